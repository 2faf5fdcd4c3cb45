"""Count habits of style that make sentences hard to read, per folder.

Reads Markdown outside of code, docstrings, comments, string literals with spaces, and test names.
`python .ci/plain_words.py` fails if a folder has more than its bound in plain_words.json; the
bounds may only fall. `--list [FOLDER]` prints every match, `--update` lowers the bounds, and
`--messages` prints every error and warning of the package for review.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BOUNDS = Path(__file__).with_name("plain_words.json")
UNIT = "token|step|rank|second|layer|head|document|run|seed|node|process|parameter|minute|hour"
COUNTED = (
    "tokens|bytes|FLOPs|GiB|MiB|seconds|ms|calls?|reads?|writes?|loss|nats|lines?|process(es)?|"
    "heads?|numbers?|values?|files?|times?|GPUs?|keys?|quer(y|ies)|losses|launches|copies|steps"
)
TELLS = {
    "go on: continue, resume": r"(go|goes|going|gone|went) on(?!\w|ly)",
    "lie, stand: be": r"(lies|stands?|stood)",
    "no noun: is none, where there is": (
        r"(is|are|was|were|be) (?-i:none)|where there (is|are)|whose is"
    ),
    "mend: fix": r"(mend(s|ed|ing)?)",
    "beside, behind: next to, after": r"(beside|besides|behind)",
    "have to: must": r"(has|have|had) to be",
    "noun clause with what": r"(?<!\w)what(?! if)(?!\w)(?![^.!?]{0,80}\?)",
    "noun clause with whoever, whatever": r"(whoever|whatever)",
    "per: a token": rf"({COUNTED}) an? ({UNIT})(?= |[,.;:)]|$)",
    "of its own, of ours": r"of (ours|yours|theirs)|of (its|their|his) own",
    "leave out, alone: omit, ignore": r"(leaves?|leaving|left) (it |them )?(out|alone)",
    "end in: raise, fail": r"ends? in (an? )?(error|exception|line)",
    "wants, knows, says: needs, has": r"(wants|knows|says|knew) (no|nothing|of|that|what|how|an?)",
}
PRINTING = ("print", "echo", "to_stderr", "warn", "note", "parser.add_argument")
NAMES = {
    "pronoun in a test name": (
        r"(it|they|them|those|others|what|who|whatever|(one|each|another|these|its)$)"
    ),
}


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of Markdown outside of code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`", "`", line)


def sentences(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line number and text of docstrings, comments and messages, and of test names (True)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, re.sub(r"`[^`]*`", "`", " ".join(node.value.split())), False
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.removeprefix("test_").replace("_", " "), True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def matches(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line number, habit and text of each match in a file."""
    text = path.read_text(encoding="utf-8")
    found = (
        sentences(text) if path.suffix == ".py" else ((n, s, False) for n, s in paragraphs(text))
    )
    for number, said, is_name in found:
        for habit, pattern in (TELLS | NAMES if is_name else TELLS).items():
            for match in re.finditer(rf"(?<![\w-])(?:{pattern})(?![\w-])", said, re.IGNORECASE):
                around = said[max(0, match.start() - 50) : match.end() + 40]
                yield number, habit, around


def folder_of(path: Path) -> str:
    """Return the folder that a file is counted in: two levels of packages and tests, else one."""
    parts = path.relative_to(ROOT).parts
    return (
        "/".join(parts[: min(2 if parts[0] in ("diffllm", "tests") else 1, len(parts) - 1)]) or "."
    )


def messages() -> Iterator[str]:
    """Yield place and text of every raised, printed or noted message in diffllm/."""
    for path in sorted((ROOT / "diffllm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                said = node.exc.args
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in PRINTING:
                said = node.args
            else:
                continue
            text = " ".join(ast.unparse(each) for each in said)
            if " " in text and ("'" in text or '"' in text):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {text}"


def main(words: list[str]) -> int:
    if words == ["--messages"]:
        print("\n".join(messages()))
        return 0
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    counts: Counter[str] = Counter()
    for path in sorted(ROOT / name for name in listed.stdout.split()):
        if path == Path(__file__) or not path.exists():
            continue
        for number, habit, around in matches(path):
            counts[folder_of(path)] += 1
            if words[:1] == ["--list"] and str(path.relative_to(ROOT)).startswith(
                *words[1:] or [""]
            ):
                print(f"{path.relative_to(ROOT)}:{number}: {habit}: {around}")
    bounds = json.loads(BOUNDS.read_text(encoding="utf-8")) if BOUNDS.exists() else dict(counts)
    if words == ["--update"]:
        lower = {name: min(n, bounds.get(name, 0)) for name, n in sorted(counts.items())}
        BOUNDS.write_text(json.dumps(lower, indent=1) + "\n", encoding="utf-8")
    above = {name: n for name, n in counts.items() if n > bounds.get(name, 0)}
    for name, number in above.items():
        print(f"{name}: {number} habits of style, at most {bounds.get(name, 0)} (--list {name})")
    print(f"{counts.total()} habits of style")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
