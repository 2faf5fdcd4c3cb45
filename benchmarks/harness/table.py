"""Everything in a folder of measurements, as Markdown."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffllm.plan.estimate import GIB
from harness.decoding import table as decoding_table
from harness.measuring import markdown, with_quartiles
from harness.records import newest, read
from harness.stages import STAGES

STEPS = (
    "", "ms", "tokens a second", "time (quartiles)", "MFU, causal", "MFU, full attention",
    "peak GiB", "first steps, s",
)  # fmt: skip
MEMORY = ("attention", "checkpointing", "plan, GiB", "measured, GiB", "measured over plan")
KERNELS = ("kernels of ", "other kernels of ")
"""How the names of tables of kernels begin."""


def table(folder: Path) -> str:
    """The newest measurement of every name, in a section a stage, with what each was made with."""
    sections = []
    for stage in STAGES:
        lines = newest(read(folder / f"{stage}.jsonl"))
        if lines:
            stamps = dict.fromkeys(
                f"{line['device']}, torch {line['torch']}, code {line['code']}"
                for line in lines.values()
            )
            sections.append(f"## Stage {stage}\n\n{'; '.join(stamps)}\n")
            sections += of_stage(lines)
    return "\n".join(sections)


def of_stage(lines: dict[str, dict[str, Any]]) -> Iterable[str]:
    """The sections of a stage's measurements, by name: one a table."""
    good = {name: line for name, line in lines.items() if line["status"] == "ok"}
    groups: dict[str, list[list[str]]] = {}
    for name, line in good.items():
        if "rounds_ms" in line["result"]:
            group, _, contestant = name.partition(": ")
            groups.setdefault(group, []).append(step_row(contestant, line["result"]))
    for group, rows in groups.items():
        yield f"### {group}\n\n{markdown(STEPS, rows)}\n"
    broken = {n: line["result"] for n, line in good.items() if ", one step of " in n}
    if broken:
        parts = list(next(iter(broken.values())))
        rows = [[n, *(f"{result[part]:,.1f}" for part in parts)] for n, result in broken.items()]
        yield f"### Milliseconds of a step\n\n{markdown(('', *parts), rows)}\n"
    peaks = [
        memory_row({**line["config"], **line["result"]})
        for name, line in good.items()
        if name.startswith("memory")
    ]
    if peaks:
        yield f"### Peak memory\n\n{markdown(MEMORY, peaks)}\n"
    for name, line in good.items():
        if name.startswith("decoding"):
            yield f"### {name}\n\n{decoding_table(line['result'])}\n"
        elif name.startswith(KERNELS):
            yield f"### {name}\n\n{kernel_table(line['result'])}\n"
    simple = [[n, text(line["result"])] for n, line in good.items() if is_simple(n, line)]
    if simple:
        yield f"### Others\n\n{markdown(('', 'result'), simple)}\n"
    bad = [[n, line["status"], text(line["result"])] for n, line in lines.items() if n not in good]
    if bad:
        yield f"### Failed\n\n{markdown(('', 'how', 'why'), bad)}\n"


def step_row(name: str, result: dict[str, Any]) -> list[str]:
    """The cells of a contestant of a group."""
    peak, time = result["peak"], result["time"]
    shares = [result.get("mfu_causal"), result.get("mfu_full")]
    return [
        name,
        f"{result['ms']:,.1f}",
        f"{result['tokens_per_s']:,.0f}",
        with_quartiles(time) if time else "",
        *("" if share is None else f"{100 * share:.1f}%" for share in shares),
        "" if peak is None else f"{peak / GIB:.1f}",
        f"{result['first_steps_s']:.0f}",
    ]


def memory_row(result: dict[str, Any]) -> list[str]:
    """The cells of a peak of memory."""
    plan, peak = result["plan"], result["measured"]
    return [
        f"`{result['attention']}`",
        "yes" if result["checkpointing"] else "no",
        f"{plan / GIB:.2f}",
        "not on a CPU" if peak is None else f"{peak / GIB:.2f}",
        "" if peak is None else f"{peak / plan:.2f}",
    ]


def kernel_table(result: dict[str, Any]) -> str:
    """The choices for the device in every case, and the longest kernel of every pass."""
    rows = []
    for case, passes in result.items():
        if "error" in passes:
            rows.append([case, "", "", passes["error"]])
            continue
        chosen = (f"{key}: {choice['value']}" for key, choice in passes["chosen"].items())
        rows.append([case, "chosen", "", "; ".join(chosen)])
        for part in [name for name in passes if name != "chosen"]:
            for name, ms in list(passes[part].items())[:1]:
                rows.append([case, part, f"{ms:.3f}", f"`{name[:90]}`"])
    return markdown(("", "pass", "ms", "kernel"), rows)


def is_simple(name: str, line: dict[str, Any]) -> bool:
    """Whether a result has no table of its own."""
    own = ("memory", "decoding", *KERNELS)
    return not (name.startswith(own) or ", one step of " in name or "rounds_ms" in line["result"])


def text(result: Any) -> str:
    """A result in one cell."""
    if isinstance(result, dict):
        return "; ".join(
            f"{key}: {text(value)}" for key, value in result.items() if key != "seconds"
        )
    if isinstance(result, float):
        return f"{result:,.4g}"
    if isinstance(result, list):
        return ", ".join(map(text, result))
    return " ".join(str(result).split())[:300].replace("|", "/")
