"""Names that other frameworks use for the keys of diffllm, for suggestions in error messages.

The names come from transformers, nanoGPT, nanochat, torchtitan, OLMo-core, lingua and Megatron-LM.
"""

SYNONYMS = {
    "seed": "random_seed manual_seed global_seed data_seed",
    "steps": "max_steps num_steps total_steps n_steps train_steps training_steps num_train_steps "
    "num_training_steps max_train_steps max_iters num_iters train_iters num_iterations iterations",
    "max_tokens": "num_tokens total_tokens train_tokens token_budget max_duration",
    "epochs": "num_epochs n_epochs max_epochs num_train_epochs train_epochs",
    "seq_len": "block_size context_length context_len context_size max_context_length ctx_len "
    "n_ctx n_positions max_position_embeddings sequence_length seq_length max_length max_seq_len "
    "max_seq_length max_sequence_length model_max_length",
    "global_batch_size": "batch_size bs train_batch_size total_batch_size global_train_batch_size "
    "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps grad_acc_steps "
    "accumulate_grad_batches",
    "micro_batch_size": "per_device_train_batch_size per_device_batch_size device_batch_size "
    "device_train_batch_size local_batch_size microbatch_size rank_microbatch_size "
    "device_train_microbatch_size train_micro_batch_size_per_gpu",
    "precision": "bf16 fp16 dtype torch_dtype mixed_precision mixed_precision_param param_dtype "
    "autocast_precision model_dtype",
    "compile": "torch_compile use_compile compile_model",
    "activation_checkpointing": "gradient_checkpointing grad_checkpointing activation_checkpoint "
    "use_gradient_checkpointing recompute_granularity recompute "
    "recompute_activations",
    "log_interval": "logging_steps log_every log_freq log_frequency logging_interval print_every "
    "log_every_n_steps logging.freq",
    "resume": "resume_from_checkpoint resume_from init_from load_path load_checkpoint load_dir",
    "model": "model.name model.flavor model.size model_name model_type model_size model_config "
    "model_name_or_path",
    "model.dim": "n_embd n_embed d_model hidden_size hidden_dim embed_dim embedding_dim emb_dim "
    "model_dim",
    "model.n_layers": "n_layer num_layers num_hidden_layers depth num_blocks n_blocks",
    "model.n_heads": "n_head num_heads num_attention_heads nhead",
    "model.n_kv_heads": "n_kv_head num_kv_heads num_key_value_heads num_query_groups "
    "n_query_groups",
    "model.head_dim": "kv_channels d_head dim_head head_size",
    "model.ffn_dim": "intermediate_size ffn_hidden_size d_ff mlp_dim mlp_hidden_size n_inner "
    "feed_forward_dim ffn_size",
    "model.vocab_size": "padded_vocab_size n_vocab",
    "model.qk_norm": "use_qk_norm qk_layernorm",
    "model.tie_embeddings": "tie_word_embeddings tied_embeddings weight_tying",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon "
    "norm_epsilon",
    "model.init_std": "initializer_range init_method_std init_base_std",
    "model.z_loss": "z_loss_multiplier z_loss_weight z_loss_coef",
    "model.rope.theta": "rope_theta rope_base rotary_base",
    "model.rope.scaling": "rope_scaling rope_type",
    "model.moe.n_experts": "num_experts num_local_experts n_routed_experts",
    "model.moe.top_k": "num_experts_per_tok experts_per_token moe_router_topk moe_top_k "
    "n_activated_experts",
    "model.moe.expert_dim": "moe_intermediate_size moe_ffn_hidden_size moe_inter_dim",
    "model.moe.n_shared": "num_shared_experts n_shared_experts",
    "model.moe.balance_loss": "router_aux_loss_coef moe_aux_loss_coeff aux_loss_coef "
    "load_balance_coeff lb_loss_weight",
    "model.moe.router_z_loss": "moe_z_loss_coeff router_z_loss_coef",
    "attention": "attn attention_type attention_variant",
    "model.attention.backend": "attn_implementation attention_backend attn_backend attn_impl "
    "attn_type",
    "data.paths": "data_path data_paths data_files train_file train_files train_data_path "
    "dataset_path",
    "data.dataset": "dataset_name hf_dataset",
    "data.name": "dataset_config_name dataset_config",
    "data.split": "dataset_split train_split",
    "data.text_column": "text_field text_key text_column_name dataset_text_field",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_model tokenizer_name_or_path",
    "data.heldout_fraction": "val_fraction val_split validation_split validation_split_percentage",
    "data.mask_documents": "document_mask document_masking intra_document_masking "
    "reset_attention_mask",
    "data.num_workers": "dataloader_num_workers",
    "optim": "optimizer optimizer_type optimizer.name",
    "optim.lr": "learning_rate max_lr peak_lr base_lr max_learning_rate",
    "optim.min_lr_ratio": "min_lr min_learning_rate lr_min lr_min_ratio min_lr_factor "
    "final_lr_frac alpha_f",
    "optim.warmup_steps": "warmup warmup_iters warmup_ratio warmup_fraction num_warmup_steps "
    "lr_warmup_steps lr_warmup_iters lr_warmup_fraction",
    "optim.decay_fraction": "decay_ratio warmdown_ratio cooldown_fraction",
    "optim.schedule": "lr_scheduler_type lr_scheduler lr_schedule scheduler lr_decay_style "
    "decay_type",
    "optim.weight_decay": "wd",
    "optim.clip_norm": "grad_clip clip_grad grad_clip_norm clip_grad_norm max_grad_norm max_norm "
    "gradient_clipping gradient_clip_val optim.clip",
    "optim.beta1": "adam_beta1 betas",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_eps adam_epsilon epsilon",
    "parallel.replicate": "dp_replicate data_parallel_replicate_degree",
    "parallel.shard": "dp_shard data_parallel_shard_degree fsdp_size",
    "parallel.expert": "expert_parallel_degree expert_parallel_size expert_model_parallel_size",
    "parallel.context": "context_parallel_degree context_parallel_size",
    "checkpoint.interval": "save_steps save_interval save_every save_freq checkpoint_interval "
    "checkpoint_every",
    "checkpoint.keep_last": "save_total_limit keep_latest_k max_checkpoints",
    "eval.interval": "eval_interval eval_steps eval_every eval_freq val_interval "
    "validation_interval val_check_interval validation.freq",
    "eval.sequences": "eval_iters eval_batches max_eval_samples limit_val_batches",
    "run.dir": "output_dir out_dir dump_dir dump_folder save_dir save_folder checkpoint_dir",
    "run.name": "run_name exp_name experiment_name job_name model_tag wandb_name wandb_run_name "
    "wandb.name wandb.run_name",
    "wandb.mode": "use_wandb wandb_log enable_wandb report_to wandb.enabled",
    "wandb.project": "wandb_project project_name",
    "metrics.tensorboard": "use_tensorboard enable_tensorboard",
}
"""Key or config group of diffllm: names of other frameworks, separated by spaces.

A name with a dot means one key, a name without a dot also the last part of any key. Names
that equal the last part of the key, such as lr, are missing: `did_you_mean` finds such names.
"""

NOTES = {
    "max_tokens": "training tokens of the run",
    "global_batch_size": "sequences per optimizer step, over all ranks; micro_batch_size: "
    "sequences per rank and forward pass",
    "micro_batch_size": "sequences per rank and forward pass; global_batch_size: sequences per "
    "optimizer step, over all ranks",
    "precision": "such as precision=bf16",
    "activation_checkpointing": "such as activation_checkpointing=full",
    "model": "a YAML file, such as model=tiny",
    "attention": "a YAML file, such as attention=diff_v2",
    "data.heldout_fraction": "share of the documents",
    "optim": "a YAML file, such as optim=adamw",
    "optim.min_lr_ratio": "share of optim.lr",
    "optim.warmup_steps": "steps; a share: optim.warmup_steps=${of_steps:0.1,200}, at most 200",
    "optim.decay_fraction": "share of all steps",
    "eval.sequences": "sequences per evaluation, over all ranks",
    "wandb.mode": "such as wandb.mode=online",
}
"""Unit or an example of keys whose values differ from those of other frameworks."""

KEY_BY_SYNONYM: dict[str, str] = {}
for _key, _names in SYNONYMS.items():
    KEY_BY_SYNONYM |= dict.fromkeys(_names.split(), _key)


def suggestion(name: str) -> str:
    """Return '; did you mean KEY?' if another framework uses `name` for KEY, else ''.

    `name` may contain dots. If KEY has a note, such as its unit, the note follows in brackets.
    """
    plain = name.lower().replace("-", "_")
    key = KEY_BY_SYNONYM.get(plain) or KEY_BY_SYNONYM.get(plain.rpartition(".")[2])
    if key is None:
        return ""
    note = f" ({NOTES[key]})" if key in NOTES else ""
    return f"; did you mean {key}?{note}"
