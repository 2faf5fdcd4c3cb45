"""Train exports without diffllm: ten steps of the Trainer of transformers.

    python training.py DIRECTORY... OUT.json

The results per directory are the losses of ten steps on one repeated batch. They also contain the
largest changes of logits by gradient checkpointing, eager attention, and saving and loading.
"""

import json
import sys
import tempfile

import torch

sys.modules["diffllm"] = None  # makes an import fail

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, logging  # noqa: E402

logging.set_verbosity_error()
IDS = torch.randint(2, 400, (4, 48), generator=torch.Generator().manual_seed(0))


def loaded_export(directory: str, **options: object) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **options)


def trainer_results(directory: str) -> dict:
    model = loaded_export(directory)
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            place, max_steps=10, learning_rate=3e-3, logging_steps=1, report_to=[], use_cpu=True,
            per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True,
            gradient_checkpointing=True, lr_scheduler_type="constant",
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in IDS]
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        model.save_pretrained(f"{place}/saved")
        again = loaded_export(f"{place}/saved").eval()
        with torch.no_grad():
            kept = (again(IDS).logits - model.eval()(IDS).logits).abs().max().item()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {"losses": losses, "kept": kept, **same_gradients(directory)}


def same_gradients(directory: str) -> dict:
    """Return the differences of logits and gradients to the default implementation."""
    found = {}
    grads = {}
    for name, options in (("default", {}), ("eager", {"attn_implementation": "eager"})):
        for checkpointing in (False, True):
            model = loaded_export(directory, **options).train()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            output = model(IDS, labels=IDS)
            output.loss.backward()
            grads[name, checkpointing] = torch.cat(
                [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            )
    first = grads.pop(("default", False))
    found["gradients"] = max((g - first).abs().max().item() for g in grads.values())
    found["largest"] = first.abs().max().item()
    return found


if __name__ == "__main__":
    *directories, out = sys.argv[1:]
    with open(out, "w", encoding="utf-8") as file:
        json.dump([trainer_results(directory) for directory in directories], file)
