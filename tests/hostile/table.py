"""Table of damages: for each file of FILES, the damage, and a pattern of the error."""

import io
import math
from pathlib import Path

import numpy as np
from runs.one_rank import flip_bit

from diffllm.config.yaml_file import MOST_NODES
from diffllm.metrics.steps import STEP_DTYPE
from hostile.damage import BOMB, MISSING, Damage, content, cut, lines, put
from hostile.places import LOSSES, NO_END

DEEP = "[" * 100_000
MANY_NODES = f"has more than {MOST_NODES:,} keys and values"
WRONG_TYPE = "has a score with a field of the wrong type"
SPLIT = ("splits", "train")
SHARD = (*SPLIT, "shards", 0)
DAMAGED_ARRAY = [
    (flip_bit, r"\.bin: damaged: its sha256 is not"),
    (cut(1), r"\.bin: \d+ bytes, expected \d+"),
]


def losses(**arrays: object) -> Damage:
    """Return a file of losses of held-out documents with some arrays replaced."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=True, **{**vars(LOSSES), **arrays})
    return content(file.getvalue())


def without_tokens(file: Path) -> None:
    with np.load(file) as arrays:
        others = {name: arrays[name] for name in arrays if name != "tokens"}
    np.savez(file, **others)


def array(values: np.ndarray) -> Damage:
    file = io.BytesIO()
    np.save(file, values)
    return content(file.getvalue())


def steps(*numbers: int) -> np.ndarray:
    rows = np.zeros(len(numbers), STEP_DTYPE)
    rows["step"] = numbers
    return rows


def score(fields: str) -> Damage:
    """Return a result of an evaluation with one score of these JSON fields."""
    return content(f'{{"key": {{}}, "unit": "x", "scores": [{{"of": "x", {fields}}}]}}')


def invalid_fields(name: str, *values: object) -> list[tuple[Damage, str]]:
    message = rf"loop\.{name} in state\.json is missing or invalid"
    return [(put("loop", name, value=value), message) for value in values]


DAMAGES: dict[str, list[tuple[Damage, str]]] = {
    "run.json": [
        (put("parameters", value=0), "has no usable parameters"),
        (put("flops_per_token", value=-1e3), "has no usable flops_per_token"),
        (put("environment", value=7), "has no usable environment"),
    ],
    "changes.jsonl": [
        (content("{"), "is not JSON"),
        (content("[]\n"), "contains a line without"),
        (content('{"step": 3}\n'), "contains a line without"),
        (content('{"step": 3, "changes": [1]}\n'), "contains a line without"),
    ],
    "events.jsonl": [
        (put("kind", value="spike"), "is damaged: line 2: kind='spike' must be one of loss_spike"),
        (put("step", value=-1), "line 2: step and tokens must be at least 0"),
        (put("batch", "samples", value={"a": [8]}), r"line 2: batch.samples.a=\[8\] must be"),
        (put("batch", "samples", value={"a": [0, 2**40]}), "line 2: batch.samples.a="),
        (Path.unlink, "an older version trained this run"),
    ],
    "config.yaml": [(content(BOMB), MANY_NODES)],
    "study.yaml": [
        (content(BOMB), MANY_NODES),
        (content("a: &a [*a]\n"), "has the alias a before its value is complete"),
        (content(f"a: {DEEP}"), "is nested too deeply"),
    ],
    "recipe.yaml": [(content(BOMB), MANY_NODES)],
    "task.jsonl": [
        (put("answer", value=MISSING), "line 1: answer is missing"),
        (
            content('{"prompt": "a", "answer": ""}'),
            "line 1: prompt, answer and candidates must not be empty",
        ),
        (put("candidates", value=["c"]), "line 1: candidates must differ"),
        (put("level", value={"x": [1]}), "line 1: level must map"),
    ],
    "steps.npy": [
        (content("step,loss\n"), "steps.npy"),
        (content(b"\x93NUMPY\x01\0\x10\0{'descr': [('a'\0"), "is not a steps.npy: "),
        (array(np.zeros(3)), "has other columns"),
        (array(np.array([{}], dtype=object)), "has other columns"),
        (array(steps(4, 3)), "its steps do not increase"),
    ],
    "document losses": [
        (content(""), "is damaged: "),
        (cut(30), "is damaged: "),
        (without_tokens, "is damaged: .*tokens"),
        (losses(tokens=LOSSES.tokens[:2]), "is damaged: tokens is int64 of shape"),
        (losses(tokens=0 * LOSSES.tokens), "documents without tokens"),
        (losses(bytes=LOSSES.nats), "is damaged: bytes is float64 of shape"),
        (losses(nats=np.array([Path("code")] * 8, dtype=object)), "is damaged: "),
        (losses(**{name: values[:0] for name, values in vars(LOSSES).items()}), "no documents"),
    ],
    "evaluation": [
        (lines(lambda texts: texts[:-1]), "its checksum differs"),
        (cut(9), "its checksum differs"),
        (lines(lambda texts: [*texts, *texts[1:]]), "its checksum differs"),
        (lines(lambda texts: [texts[0], *texts[2:], texts[1]]), "its checksum differs"),
        (put("correct", value=True), "its checksum differs"),
        (lines(lambda texts: [texts[0].replace("0.333", "0.999"), *texts[1:]]), "differs"),
        (lines(lambda texts: [texts[0].replace("sha256", "sha"), *texts[1:]]), "differs"),
        (lines(lambda texts: texts[1:]), "is not a result of an evaluation"),
        (content(""), "is not JSON"),
        (content("[]"), "is not a result of an evaluation"),
        (content('{"key": {}, "unit": 3, "scores": []}'), "has no unit or no scores"),
        (content('{"key": {}, "unit": "x", "scores": 4}'), "has no unit or no scores"),
        (content('{"key": {}, "unit": "x", "scores": [3]}'), WRONG_TYPE),
        (score('"y": 3'), WRONG_TYPE),
        (score('"value": "y"'), WRONG_TYPE),
        (score('"value": 1e150'), WRONG_TYPE),
        (score('"value": NaN'), WRONG_TYPE),
        (score('"value": true'), WRONG_TYPE),
        (score('"value": 1, "chance": [1]'), WRONG_TYPE),
        (score('"value": 1, "interval": [1]'), WRONG_TYPE),
        (score('"value": 1, "interval": 1'), WRONG_TYPE),
        (score('"value": 1, "interval": ["x", 1]'), WRONG_TYPE),
        (score('"value": 1, "range": [1]'), WRONG_TYPE),
        (score('"value": 1, "level": [1]'), WRONG_TYPE),
        (score('"value": 1, "by_z": 3'), WRONG_TYPE),
        (score('"value": 1, "by_z": {"a": []}'), WRONG_TYPE),
    ],
    "state.json": [
        (Path.unlink, "state.json is missing"),
        (cut(9), r"state.json has [\d,]+ bytes, not "),
    ],
    "tensors": [(flip_bit, "__0_0.distcp has a wrong checksum")],
    "signed state.json": [
        (content(f'{{"loop": {DEEP}'), "state.json is nested too deeply"),
        (put("step", value=2), "state.json has step 2, but the directory name has 3"),
        *invalid_fields("step", MISSING, "3"),
        *invalid_fields("data", MISSING, None),
        *invalid_fields("order", MISSING, 1),
        *invalid_fields("spikes", MISSING, {}),
        *invalid_fields("compiled", MISSING, 1),
        *invalid_fields("mkl_mode", 5, "AVX2\0", None),
        *invalid_fields("visible_keys", None, {"keys": "9"}, {"keys": 2, "queries": 3}),
        *invalid_fields("tokens", None, -1, "9"),
        *invalid_fields("training_flops", -1.0, "9", math.nan),
    ],
    "cached manifest": [
        (put("vocab_size", value="x"), "vocab_size='x' must be a whole number.*; delete"),
        (put("eos_id", value=300), "eos_id=300 must be below vocab_size=300"),
        (put("dtype", value="object"), "dtype=object must be uint16 for 300 pieces"),
        (put("splits", value={}), "splits.train is missing"),
        (put(*SPLIT, "documents", value=-1), "train: counts must be at least 0"),
        (put(*SPLIT, "tokens", value=9), "the tokens of shards must add up to 9"),
        (put(*SHARD, "file", value="../t"), "must be a file name"),
        (put(*SHARD, "file", value="a\0"), "must be a file name"),
        (put(*SHARD, "mask", value="../m"), "must be a file name"),
        (put(*SHARD, "mask", value="m"), "must have both mask and"),
        (put("format_version", value=99), "format 99, expected 1"),
        (put("heldout_unigram_entropy", value=1e999), "must be a finite number"),
    ],
    "packing plan": [
        (put("counts", "sequences", value=3), "file sizes do not match.*; delete"),
        (put("counts", "padding", value=-1), "counts must be at least 0"),
        (put("files", value={}), "files must be starts.bin, lengths.bin"),
        (put("files", "starts.bin", "bytes", value=10**30), "beyond 64 bits"),
    ],
    "starts of pieces": DAMAGED_ARRAY,
    "lengths of pieces": DAMAGED_ARRAY,
    "first pieces": DAMAGED_ARRAY,
    "partial tokens": [(flip_bit, "damaged: ")],
    "tokens": [
        (cut(2), r"train-00000-00000\.bin: [\d,]+ bytes, expected .* delete .* to prepare"),
        (Path.unlink, r"train-00000-00000\.bin: no file, expected "),
        (flip_bit, r"train-00000-00000\.bin: damaged: its sha256 is not"),
    ],
    "tokenizer.model": [
        (Path.unlink, "no such tokenizer file"),
        (content("not a model"), "not a valid sentencepiece model"),
    ],
    "tokenizer_config.json": [
        (put("eos_token", value="<none>"), "contains no EOS '<none>'; set"),
        (put("eos_token", value={"content": []}), r"contains no EOS \[\]; set"),
        (content(DEEP), "not a valid tokenizer config"),
        (content("[]"), "not a valid tokenizer config"),
    ],
    "tokenizer.json": [
        (content("{}"), "not a valid tokenizer.json"),
        (content(NO_END), "contains no EOS "),
        (content(NO_END.replace('"b": 1', '"<end>": 16777216')), "16777216 must be below"),
        (content(NO_END.replace("null", '"none"')), "Unk token `none` not found"),
    ],
    "Megatron tokens": [
        (cut(2), "gaps or overlaps|ends at token"),
        (cut(1), r"3,811 bytes, .* not 1,905 numbers of 2"),
    ],
    "Megatron index": [
        (Path.unlink, r"idx: unusable .No such file"),
        (cut(8), "bytes, which are not 61 numbers of 8"),
        (content(b"x" * 90), "not a Megatron index"),
        (content(""), "not a Megatron index"),
    ],
    "datatrove tokens": [(cut(2), "ends at token 1,906, but .* has 1,905")],
    "datatrove index": [
        (Path.unlink, "index: unusable .No such file"),
        (content(""), "the index has no documents"),
    ],
    "datatrove metadata": [(content("x|3"), "number of bytes per token is '3'")],
    "config of Llama": [(put("num_hidden_layers", value=90), "needs at least 90")],
    "config of Qwen3 MoE": [(put("num_experts", value=65536), "needs at least 131072")],
    "config of diffllm": [
        (put("mlp_only_layers", value=True), "=True, which must be a list of whole numbers"),
        (put("rope_parameters", value={"rope_type": ["x"]}), r"=\['x'\], which must be text"),
        (put("attention", "context_scale", value="${oc.env:HOME}"), "interpolation"),
        (put("moe", value={"n_experts": "${oc.env:HOME}"}), "an interpolation in its moe settings"),
        (put("rms_norm_eps", value=math.inf), "rms_norm_eps=inf, which must be a finite number"),
        (put("vocab_size", value=0), "vocab_size=0, which must be a whole number above 0"),
    ],
    "safetensors index": [
        (content(DEEP), "is nested too deeply"),
        (put("weight_map", value={}), "has no weight_map"),
        (put("weight_map", value={"a": "../x"}), r"has '../x' in its weight_map"),
        (put("weight_map", value={"a": ".."}), "is not a regular file"),
        (put("weight_map", value={"a": "x\0"}), "embedded null"),
        (put("weight_map", value={"a": "none"}), "none cannot be read: No such file"),
    ],
}
