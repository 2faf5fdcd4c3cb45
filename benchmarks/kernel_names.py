"""The kernels that attention really runs, as the profiler names them, beside what was chosen.

    python benchmarks/kernel_names.py [--head-dim 128] [--length 4096]

A CPU has no kernels to name: there it is torch's op.
"""

import argparse
import re
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from diffllm.config import load_config
from diffllm.model import build_model
from diffllm.model.choice import Choice
from diffllm.model.documents import Documents

VARIANTS = (
    ("standard",),
    ("gated",),
    ("diff_v1", "model.attention.values=wide"),
    ("diff_v1", "model.attention.values=split"),
    ("diff_v2",),
)
KERNEL = re.compile("attention|sdpa|fmha|flash", re.IGNORECASE)
OP = re.compile("aten::_.*(attention|flash|cudnn).*|torch_attn::.*|flash_attn.*")


def attention_kernels(run: Callable[[], object]) -> list[str]:
    """Names of the attention kernels that `run` launches on a GPU, else of its attention ops.

    Call `run` once before: what it compiles and plans would be seen, too.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = profiler.events() or []
    launched = {e.name for e in events if e.device_type == DeviceType.CUDA}
    found = {name for name in launched if KERNEL.search(name) and "::_" not in name}
    return sorted(found or {e.name for e in events if OP.fullmatch(e.name)})


def forward_kernels(
    words: list[str], device: torch.device, length: int, masked: bool
) -> tuple[dict[str, Choice], list[str]]:
    """What is chosen for a layer of a config, and the kernels of its forward pass.

    Args:
        words: overrides, of which seq_len is `length`.
        masked: two documents in a row.
    """
    cfg = load_config([*words, f"seq_len={length}"]).model
    dtype = torch.bfloat16
    choices = cfg.attention.choices(cfg, device, dtype, masked)
    with device:
        model = build_model(cfg).to(dtype)
    tokens = torch.ones(1, length, dtype=torch.int64)
    tokens[0, length // 3] = 0
    documents = Documents.of(tokens, 0).to(device) if masked else None
    rope, mask = model.whole_sequences(tokens.to(device), documents, dtype)
    x = torch.randn(1, length, cfg.dim, dtype=dtype, device=device, requires_grad=True)

    def run() -> None:
        model.layers[0].attention(x, rope, mask)

    run()
    return choices, attention_kernels(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--length", type=int, default=4096)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    print(f"torch {torch.__version__}, cuDNN {cudnn}, {device.type}")
    shape = ["model=tiny", f"model.head_dim={args.head_dim}"]
    for masked in (False, True):
        for variant, *extra in VARIANTS:
            words = [*shape, f"attention={variant}", *extra]
            choices, names = forward_kernels(words, device, args.length, masked)
            print(" ".join([variant, *extra, "documents" if masked else ""]).rstrip())
            for name, choice in choices.items():
                print(f"    {name}: {choice.value} ({choice.reason})")
            print(f"    ran: {', '.join(names) or 'no kernel by a known name'}")


if __name__ == "__main__":
    main()
