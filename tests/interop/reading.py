"""Read exports without diffllm, and save the results.

    python reading.py REQUESTS.json OUT.pt

A request is a directory and token ids. The results are logits, and greedy continuations with a
cache, without a cache, and in a batch with padding on the left.
"""

import json
import sys

import torch

sys.modules["diffllm"] = None  # makes an import fail

from transformers import AutoModelForCausalLM, AutoTokenizer, logging  # noqa: E402

logging.set_verbosity_error()


@torch.no_grad()
def model_outputs(request: dict) -> dict:
    model, info = AutoModelForCausalLM.from_pretrained(
        request["directory"], trust_remote_code=True, output_loading_info=True
    )
    model.eval()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (kind, info[kind])
    tokenizer = AutoTokenizer.from_pretrained(request["directory"], trust_remote_code=True)
    ids = torch.tensor(request["ids"])
    short = ids[:, :10]
    options = {"max_new_tokens": request["new"], "do_sample": False, "eos_token_id": None}
    asked = {"attention_mask": torch.ones_like(short), **options}
    padded = torch.full((2, 10), model.config.pad_token_id)
    mask = torch.zeros_like(padded)
    padded[0], mask[0] = short[0], 1
    padded[1, 4:], mask[1, 4:] = short[1, :6], 1
    alone = model.generate(short[1:, :6], attention_mask=mask[1:, 4:], **options)
    both = model.generate(padded, attention_mask=mask, **options)
    return {
        "class": type(model).__name__,
        "logits": model(ids).logits,
        "greedy": model.generate(short[:1], **{**asked, "attention_mask": mask[:1]}),
        "uncached": model.generate(
            short[:1], use_cache=False, **{**asked, "attention_mask": mask[:1]}
        ),
        "padded_first": both[:1],
        "padded_second": both[1:, 4:],
        "second": alone,
        "tokens": tokenizer(request["text"], add_special_tokens=False)["input_ids"],
        "decoded": tokenizer.decode(tokenizer(request["text"])["input_ids"]),
    }


if __name__ == "__main__":
    requests, out = sys.argv[1:]
    with open(requests, encoding="utf-8") as file:
        torch.save([model_outputs(request) for request in json.load(file)], out)
