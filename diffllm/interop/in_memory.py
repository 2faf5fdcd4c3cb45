"""A decoder in memory as a model of transformers, without a directory in between."""

from pathlib import Path

import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from diffllm.data import Tokenizer
from diffllm.interop.fast import fast_tokenizer
from diffllm.interop.modeling_diffllm import DiffLLMConfig, DiffLLMForCausalLM, RotaryEmbedding
from diffllm.interop.settings import model_settings, tokenizer_settings
from diffllm.layouts import layout_of
from diffllm.model import Transformer


def as_transformers(model: Transformer, tokenizer: Tokenizer) -> DiffLLMForCausalLM:
    """Return the model of our modelling file that computes what a decoder computes.

    It has the decoder's parameters, not copies of them, on the device where they are. Raises
    ConfigError for a variant of a plugin's, which no modelling file has.
    """
    layout = layout_of(model.cfg, own=True)
    device = model.tok_embeddings.weight.device
    ours = {**{n: p.detach() for n, p in model.named_parameters()}, **model.router_state()}
    with torch.device("meta"):
        made = DiffLLMForCausalLM(DiffLLMConfig(**model_settings(layout, tokenizer)))
    values = {tensor.name: tensor.of(ours).to(device) for tensor in layout.exported}
    if model.cfg.tie_embeddings:
        values["lm_head.weight"] = values["model.embed_tokens.weight"]
    made.load_state_dict(values, assign=True)
    made.tie_weights()
    for module in made.modules():
        if isinstance(module, RotaryEmbedding):  # its table is in no checkpoint
            module.to_empty(device=device)
            module.fill()
    return made.eval().requires_grad_(False)


def as_fast(path: Path, tokenizer: Tokenizer, length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer as transformers has it; raises DataError where no fast one equals it.

    Args:
        path: the file that `tokenizer` is read from, a sentencepiece model or a tokenizer.json.
        length: most tokens that the model takes.
    """
    fast = path.suffix == ".json"
    pieces = tokenizers.Tokenizer.from_file(str(path)) if fast else fast_tokenizer(path)
    return PreTrainedTokenizerFast(tokenizer_object=pieces, **tokenizer_settings(tokenizer, length))
