"""diffllm attention-map on a finished run: a figure, a table, and what it refuses."""

import pytest
from matplotlib.image import imread

from diffllm import tools
from diffllm.data import Tokenizer


def call(run, *words):
    return tools.main(["attention-map", f"run={run}", *words])


def test_the_figure_is_written_and_the_table_has_a_line_a_head(finished_run, tmp_path, capsys):
    out = tmp_path / "map.png"
    assert call(finished_run, "prompt=What is 1 = 2?", f"out={out}") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"figure: {out}"
    assert printed[0].split()[0] == "head"
    assert [line.split()[0] for line in printed[1:-1]] == ["0", "1", "2", "3"]
    whole = imread(out)
    assert whole.std() > 0.05
    assert call(finished_run, "prompt=What is 1 = 2?", f"out={out}", "head=1", "layer=0") == 0
    assert imread(out).shape != whole.shape
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]] == ["1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layer=2"], "layer=2 does not exist: this run has 0 to 1"),
        (["layer=-2"], "layer=-2 does not exist: this run has 0 to 1"),
        (["head=4"], "head=4 does not exist: this run has 0 to 3"),
        (["head=first"], "head=first is neither a number nor all"),
        (["step=3"], "has no checkpoint of step 3; there are [2, 4]"),
        (["out=/no/such/directory/map.png"], "No such file or directory"),
        (["prompt="], "the prompt has 0 tokens; a figure takes 1 to 32"),
        (["prompt=" + "word " * 200], "tokens; a figure takes 1 to 32"),
        (["layer=x"], "layer='x' is not int"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(finished_run, capsys, words, message):
    before = sorted(finished_run.iterdir())
    assert call(finished_run, "prompt=a", *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert sorted(finished_run.iterdir()) == before


def test_a_piece_is_what_its_token_decodes_to(finished_run):
    tokenizer = Tokenizer.from_file(finished_run / "tokenizer.model")
    ids = tokenizer.encode("The number 12.")
    assert "".join(tokenizer.piece(i) for i in ids).replace("▁", " ").strip() == "The number 12."
