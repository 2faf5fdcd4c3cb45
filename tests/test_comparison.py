"""`diffllm count --compare`: what the table says, how it is laid out, what is refused."""

import json
import os
import pty
import re
import subprocess
import sys
import termios

import pytest
from diffllm.cli.count_table import print_counts, short
from processes import PATIENCE_S

from diffllm import cli as tools
from diffllm import load_config
from diffllm.cli.count import count

FIVE = ("standard", "gated", "diff_v1", "diff_v2", "standard_1p5x_heads")
PARTS = ("wq", "wk", "wv", "wo", "lambda/gate", "head norms", "sink")
REST = ("ffn", "norms", "embeddings/output")
LABELS = (*PARTS, "attention", *REST, "total", "active", "without embedding", "over target")
LABELS = (*LABELS, "ffn_dim", "MFLOPs a token", "KV bytes a token")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def counts_of(variant, *overrides):
    return count(load_config([f"attention={variant}", *overrides]))


def printed(capsys, *words):
    assert tools.main(["count", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def parse(text):
    """The names above the columns, and label -> [(value, change)]."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if set(line.strip()) == {"─"})
    rows = {}
    for line in filter(str.strip, lines[at + 1 :]):
        (label,) = [name for name in LABELS if line.startswith(f"{name} ")]
        cells, words = [], line.removeprefix(label).split()
        while words:
            value = words.pop(0)
            change = words.pop(0) if words and words[0][0] in "+-" and value[0] not in "+-" else ""
            cells.append((value, change))
        rows[label] = cells
    return lines[at - 1].split(), rows


def amount(change):
    """+537M -> 537000000."""
    sign, number, unit = re.fullmatch(r"([+-])([\d.,]+)([KMB]?)", change).groups()
    return float(sign + number.replace(",", "")) * UNITS[unit]


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param([], id="plain"),
        pytest.param(["model.match_params_to=diff_v2"], id="matched", marks=pytest.mark.slow),
    ],
)
def test_every_cell_is_a_value_and_its_change_or_an_equals_sign(capsys, extra):
    overrides = ["model=dense_7b", "seq_len=4096", *extra]
    names, rows = parse(printed(capsys, f"--compare={','.join(FIVE)}", *overrides))
    assert names == list(FIVE)
    counts = [counts_of(name, *overrides) for name in FIVE]
    expected = {
        name: [c["by_component"][name] for c in counts]
        for name in (*PARTS, *REST)
        if name != "sink"
    }
    expected |= {
        "attention": [c["attention_params"] for c in counts],
        "total": [c["total_params"] for c in counts],
        "active": [c["active_params"] for c in counts],
        "without embedding": [c["non_embedding_params"] for c in counts],
        "ffn_dim": [c["ffn_dim"] for c in counts],
        "KV bytes a token": [c["kv_cache_bytes_per_token"] for c in counts],
    }
    flops = rows.pop("MFLOPs a token")
    over = rows.pop("over target", None)
    assert list(rows) == [label for label in LABELS if label in expected]
    for label, numbers in expected.items():
        first = numbers[0]
        assert rows[label][0] == (f"{first:,}", "")
        for number, (value, change) in zip(numbers[1:], rows[label][1:], strict=True):
            if number == first:
                assert (value, change) == ("=", ""), label
            else:
                assert value == f"{number:,}", label
                assert amount(change) == pytest.approx(number - first, rel=0.005), label
    for each, (value, change) in zip(counts, flops, strict=True):
        assert value == f"{each['flops_per_token'] / 1e6:,.1f}"
        if each is not counts[0]:
            more = 100 * (each["flops_per_token"] / counts[0]["flops_per_token"] - 1)
            assert change == f"{more:+.1f}%"
    if extra:
        target = counts_of("diff_v2", "model=dense_7b")["total_params"]
        assert over == [(f"{100 * (c['total_params'] / target - 1):+.3f}%", "") for c in counts]
    else:
        assert over is None


def test_the_parts_sum_to_the_totals(capsys):
    _, rows = parse(printed(capsys, "--compare", "standard_sink,diff_v1,diff_v2", "model=tiny"))

    def number(label, column):
        value, _ = rows[label][column]
        return number(label, 0) if value == "=" else int(value.replace(",", ""))

    for column in range(3):
        inside = sum(number(label, column) for label in PARTS if label in rows)
        assert inside == number("attention", column)
        assert inside + sum(number(label, column) for label in REST) == number("total", column)
    assert [value for value, _ in rows["sink"]] == ["8", "0", "0"]


def test_what_no_variant_has_is_no_row(capsys):
    _, rows = parse(printed(capsys, "--compare", "standard,gated", "model=tiny"))
    assert "head norms" not in rows
    assert "sink" not in rows
    assert rows["lambda/gate"] == [("0", ""), ("32,768", "+32.8K")]


def test_what_is_matched_stands_above(capsys):
    out = printed(
        capsys, "--compare", "standard,gated", "model=tiny", "model.match_params_to=diff_v2"
    )
    target = counts_of("diff_v2", "model=tiny")["total_params"]
    assert f"matched to diff_v2: {target:,} parameters at ffn_dim 384\n" in out


@pytest.mark.parametrize(
    "words", [["--compare", "standard,diff_v2"], ["--compare=standard,diff_v2"]]
)
def test_json_maps_variants_to_their_counts(capsys, words):
    overrides = ["model=tiny", "model.match_params_to=gated"]
    given = json.loads(printed(capsys, *overrides, *words, "--json"))
    assert list(given) == ["standard", "diff_v2"]
    for name, counts in given.items():
        assert counts == counts_of(name, *overrides)
        assert sum(counts["by_component"].values()) == counts["total_params"]
        assert counts["matched"]["target"] == "gated"


# Layout


def test_a_pipe_gets_one_table_however_wide(capsys):
    names = [*FIVE, "diff_v2_lambda_scalar", "diff_v1_no_head_norm", "gated_headwise"]
    out = printed(capsys, "--compare", ",".join(names), "model=dense_7b")
    assert parse(out)[0] == names
    assert "…" not in out
    assert "\x1b" not in out


def on_a_terminal(columns, *words):
    """Return the text that the command draws on a terminal, without its colours."""
    main, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (50, columns))
    code = "import sys; from diffllm.cli import main; sys.exit(main(sys.argv[1:]))"
    kept = {name: v for name, v in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "count", *words],
        env={**kept, "TERM": "xterm-256color"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    output = b""
    try:
        while block := os.read(main, 65536):
            output += block
    except OSError:
        pass  # the other end is closed
    assert process.wait(PATIENCE_S) == 0
    os.close(main)
    return plain(output.decode().replace("\r", ""))


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def blocks(text):
    """Each table of a text."""
    starts = [m.start() for m in re.finditer(r"^ +standard\b.*\n *─", text, re.M)]
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


@pytest.fixture(scope="module")
def widest():
    overrides = ["model=dense_7b", "seq_len=4096", "model.match_params_to=diff_v2"]
    return {name: counts_of(name, *overrides) for name in FIVE}


@pytest.mark.parametrize(
    ("columns", "shapes"), [(130, [5]), (129, [4, 2]), (80, [3, 2, 2]), (30, [2, 2, 2, 2])]
)
def test_a_terminal_gets_blocks_that_fit_and_no_number_is_cut(
    monkeypatch, capsys, widest, columns, shapes
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("COLUMNS", str(columns))
    print_counts("a title", widest)
    text = plain(capsys.readouterr().out)
    assert "…" not in text
    tables = [parse(block) for block in blocks(text)]
    assert [len(names) for names, _ in tables] == shapes
    assert [name for names, _ in tables for name in names[1:]] == list(FIVE[1:])
    assert {names[0] for names, _ in tables} == {"standard"}
    assert all(len(cells) == len(names) for names, rows in tables for cells in rows.values())
    if columns >= 80:
        assert max(map(len, text.splitlines())) <= columns


@pytest.mark.slow
def test_a_real_terminal_is_measured():
    text = on_a_terminal(50, "--compare", "standard,gated,diff_v2", "model=tiny")
    tables = blocks(text)
    assert [len(parse(block)[0]) for block in tables] == [2, 2]
    assert max(len(line) for block in tables for line in block.splitlines()) <= 50


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (5, "+5"),
        (-1408, "-1,408"),
        (9999, "+9,999"),
        (-10_000, "-10K"),
        (24_576, "+24.6K"),
        (999_499, "+999K"),
        (999_500, "+1M"),
        (-536_870_912, "-537M"),
        (999_600_000, "+1B"),
        (1_073_741_824, "+1.07B"),
    ],
)
def test_differences_are_short(difference, text):
    assert short(difference) == text
    assert len(text) <= 6


# What is refused


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--compare"], ["--compare", "two or more"]),
        (["--compare="], ["--compare", "two or more"]),
        (["--compare", "--json"], ["--compare", "two or more"]),
        (["--compare", "model=tiny"], ["--compare", "two or more"]),
        (["--compare", "standard"], ["--compare=standard", "two or more"]),
        (["--compare", "standard,", "gated"], ["--compare=standard,", "no space"]),
        (["--compare", "standard,diff_v3"], ["diff_v3", "did you mean diff_v2?", "gated"]),
        (["--compare", "standard,../data/files"], ["../data/files", "choose from", "gated"]),
        (["--compare", "gated,gated"], ["gated,gated", "twice"]),
        (["--compare", "a,b", "--compare=c,d"], ["--compare", "twice"]),
        (["--compare", "standard,gated", "attention=gated"], ["attention=gated", "drop one"]),
        (
            ["--compare", "standard,diff_v1", "model.n_heads=3", "model.n_kv_heads=3"],
            ["diff_v1: model.n_heads=3 must be even"],
        ),
        (["--compare", "standard,gated", "model.match_params_to=gatd"], ["did you mean gated?"]),
        (["--compare", "standard,gated", "steps=0"], ["steps=0"]),
        (["--comapre", "standard,gated"], ["--comapre"]),
    ],
)
def test_a_wrong_comparison_is_one_line_and_exit_code_2(capsys, words, named):
    assert tools.main(["count", "model=tiny", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert all(part in err for part in named), err
