"""Measure how dense the code is, per package.

`python .ci/style_numbers.py` prints for each package: tokens per line of code, comprehensions per
1,000 lines of code, names that are pronouns or participles, the share of comment lines, and the
mean number of lines of a function with its signature and docstring. It fails if the tokens per
line, the names or the dense forms (see dense_form) of a package exceed the bounds in
style_numbers.json, which may only fall: `--update` lowers them. `--list PACKAGE` prints the
functions with the most comprehensions and walruses, every pronoun and every dense form.
"""

import ast
import io
import json
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BOUNDS = Path(__file__).with_name("style_numbers.json")
PRONOUNS = {
    *("alike", "asked", "by", "each", "earlier", "found", "given", "here", "how", "kept", "known"),
    *("left", "made", "mine", "more", "of", "ours", "own", "said", "same", "theirs", "there"),
    *("told", "wanted", "what", "where", "whole", "why"),
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CODE = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
LISTED = 20


class Function(NamedTuple):
    place: str
    density: int
    """Number of comprehensions and walruses; a comprehension inside another counts twice more."""
    lines: int
    """Lines with the signature and the docstring."""


@dataclass
class Numbers:
    """Counts of a package."""

    lines: int = 0
    comment_lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    comprehensions: int = 0
    pronouns: list[str] = field(default_factory=list)
    """Place and name of each variable or parameter in PRONOUNS."""
    dense_forms: list[str] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)

    @property
    def tokens_per_line(self) -> float:
        return round(self.tokens / max(self.code_lines, 1), 1)

    @property
    def bounded(self) -> dict[str, float]:
        """The numbers that may not rise."""
        return {
            "tokens per line": self.tokens_per_line,
            "pronouns": len(self.pronouns),
            "dense forms": len(self.dense_forms),
        }

    @property
    def row(self) -> list[str]:
        per_thousand = 1000 * self.comprehensions / max(self.code_lines, 1)
        lines_of_functions = sum(function.lines for function in self.functions)
        return [
            f"{self.tokens_per_line:.1f}",
            f"{per_thousand:.0f}",
            f"{len(self.pronouns)}",
            f"{100 * self.comment_lines / max(self.lines, 1):.1f}%",
            f"{lines_of_functions / max(len(self.functions), 1):.1f}",
        ]

    def add(self, path: Path) -> None:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        self.lines += len(source.splitlines())
        with_code = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in CODE:
                self.tokens += 1
                with_code.add(token.start[0])
            # A comment after code is not a line of comments.
            elif token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                self.comment_lines += 1
        self.code_lines += len(with_code)
        place = path.relative_to(ROOT)
        for node in ast.walk(tree):
            self.comprehensions += isinstance(node, COMPREHENSIONS)
            name = variable_name(node)
            if name in PRONOUNS:
                self.pronouns.append(f"{place}:{node.lineno}: {name}")
            form = dense_form(node)
            if form:
                self.dense_forms.append(f"{place}:{node.lineno}: {form}")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions += measured(node, f"{place}:{node.lineno} {node.name}")


def variable_name(node: ast.AST) -> str:
    """Return the name that a node assigns; "" for other nodes."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else ""


def dense_form(node: ast.AST) -> str:
    """Return a name for a form with several steps in one expression; "" for other nodes."""
    if not isinstance(node, (*COMPREHENSIONS, ast.IfExp)):
        return ""
    inner = [other for other in ast.walk(node) if other is not node]
    if isinstance(node, ast.IfExp):
        is_nested = any(isinstance(other, ast.IfExp) for other in inner)
        return "conditional expression in another" if is_nested else ""
    if any(isinstance(other, COMPREHENSIONS) for other in inner):
        return "comprehension in another"
    if any(isinstance(other, ast.NamedExpr) for other in inner):
        return "walrus in a comprehension"
    has_condition = any(loop.ifs for loop in node.generators)
    if len(node.generators) > 1 and has_condition:
        return "comprehension with two loops and a condition"
    return ""


def measured(function: ast.FunctionDef | ast.AsyncFunctionDef, place: str) -> Iterator[Function]:
    """Yield the measures of a function; nothing if it has only a docstring."""
    body = function.body[ast.get_docstring(function) is not None :]
    if not body:
        return
    density = 0
    for node in ast.walk(ast.Module(body, [])):
        density += isinstance(node, (*COMPREHENSIONS, ast.NamedExpr))
        if isinstance(node, COMPREHENSIONS):
            inner = [other for other in ast.walk(node) if isinstance(other, COMPREHENSIONS)]
            density += 2 * (len(inner) - 1)
    yield Function(place, density, (function.end_lineno or 0) - function.lineno + 1)


def package_of(path: Path) -> str:
    """Return the package of a file: diffllm/NAME, or diffllm for files at its top."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: min(2, len(parts) - 1)])


def print_places(numbers: Numbers) -> None:
    densest = sorted(numbers.functions, key=lambda function: function.density, reverse=True)
    for function in densest[:LISTED]:
        print(f"{function.density:4} {function.lines:4} lines  {function.place}")
    print("\n".join(numbers.pronouns + numbers.dense_forms))


def main(words: list[str]) -> int:
    packages: dict[str, Numbers] = {}
    for path in sorted((ROOT / "diffllm").rglob("*.py")):
        for name in (package_of(path), "all"):
            packages.setdefault(name, Numbers()).add(path)
    if words[:1] == ["--list"]:
        print_places(packages[words[1] if len(words) > 1 else "all"])
        return 0
    heads = ["tokens/line", "comprehensions", "pronouns", "comments", "function"]
    print(f"{'':24}{''.join(f'{head:>15}' for head in heads)}")
    for name, numbers in packages.items():
        print(f"{name:24}{''.join(f'{cell:>15}' for cell in numbers.row)}")
    bounds = json.loads(BOUNDS.read_text(encoding="utf-8"))
    failed = False
    for name, numbers in packages.items():
        bounds_of_package = bounds.setdefault(name, numbers.bounded)
        for measure, value in numbers.bounded.items():
            bound = bounds_of_package[measure]
            if words == ["--update"]:
                bounds_of_package[measure] = min(value, bound)
            if value > bound:
                failed = True
                print(f"{name}: {measure} {value}, at most {bound} (--list {name})")
    if words == ["--update"]:
        BOUNDS.write_text(json.dumps(bounds, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
