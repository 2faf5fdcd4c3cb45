"""Generate with exports in vLLM, in a separate environment without diffllm.

    python serving.py REQUESTS.json OUT.json

A request is a directory, prompts of token ids, and whether vLLM compiles the model. The results are
log-probabilities of the tokens of prompts and of 16 greedy tokens after each prompt. They also
contain the log-probabilities of a repeated prompt, and the capacity of the KV cache in tokens.
"""

import json
import os
import sys

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
)  # fmt: skip

from vllm import LLM, SamplingParams


def served(request: dict) -> dict:
    llm = LLM(
        request["directory"], trust_remote_code=True, dtype="float32", max_model_len=256,
        enforce_eager=not request["compiled"], disable_log_stats=False,
        max_num_seqs=3, max_num_batched_tokens=64,  # prompts wait, and are split
        enable_prefix_caching=True, enable_chunked_prefill=True,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    greedy = {"temperature": 0, "max_tokens": 16, "logprobs": 1, "ignore_eos": True}
    done = llm.generate(prompts, SamplingParams(prompt_logprobs=1, **greedy))
    found = []
    for ids, one in zip(request["prompts"], done, strict=True):
        of_prompt = [p[t].logprob for p, t in zip(one.prompt_logprobs[1:], ids[1:], strict=True)]
        found.append({"tokens": ids + tokens_of(one), "logprobs": of_prompt + logprobs_of(one)})
    llm.generate(prompts[:1], SamplingParams(**greedy))
    (again,) = llm.generate(prompts[:1], SamplingParams(**greedy))
    cache = llm.llm_engine.vllm_config.cache_config
    return {
        "found": found,
        "again": {"tokens": tokens_of(again), "logprobs": logprobs_of(again)},
        "cached": again.num_cached_tokens,
        "cache_tokens": cache.num_gpu_blocks * cache.block_size,
    }


def tokens_of(one) -> list[int]:
    return list(one.outputs[0].token_ids)


def logprobs_of(one) -> list[float]:
    return [p[t].logprob for p, t in zip(one.outputs[0].logprobs, tokens_of(one), strict=True)]


if __name__ == "__main__":
    requests, out = sys.argv[1:]
    with open(requests, encoding="utf-8") as file:
        results = [served(request) for request in json.load(file)]
    with open(out, "w", encoding="utf-8") as file:
        json.dump(results, file)
