"""The size of the package in lines of code, its docstrings and comments, and how it names things.

As a script, this file prints the lines of each folder.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("unitrain", "backends")

# Each bound is the number of today: lower those of code and names, and raise those of docstrings and comments.
MOST_CODE = 20_991
LEAST_DOCSTRINGS = 0.320  # lines of docstrings for each line of code
LEAST_COMMENTS = 0.074
MOST_PRONOUNS = 2
MOST_HEADLESS = 8

PRONOUNS = ("one", "own", "found", "its", "before")
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Lines(NamedTuple):
    """Numbers of lines: with code, of docstrings, and with a comment, which may stand behind code."""

    code: int = 0
    docstrings: int = 0
    comments: int = 0

    def plus(self, other: Lines) -> Lines:
        return Lines(*(sum(pair) for pair in zip(self, other, strict=True)))

    def __str__(self) -> str:
        code, docstrings, comments = self
        return f"{code:6} {docstrings:6} {comments:6} {docstrings / (code or 1):6.2f} {comments / (code or 1):6.3f}"


def lines_of(source: str) -> Lines:
    """Count the lines of a file. Blank lines are none, in docstrings, too. Docstrings of attributes count."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    blank = {number for number, line in enumerate(source.splitlines(), 1) if not line.strip()}
    return Lines(len(code - docstrings), len(docstrings - blank), len(comments))


def files() -> Iterator[tuple[Path, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def total() -> Lines:
    lines = Lines()
    for _, source in files():
        lines = lines.plus(lines_of(source))
    return lines


def pronouns(tree: ast.AST) -> Iterator[str]:
    """Yield the names of variables, parameters and attributes that are pronouns, at each place that sets them."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr.strip("_")
        if name in PRONOUNS:
            yield name


def headless(tree: ast.AST) -> Iterator[str]:
    """Yield the first lines of docstrings that say "what" instead of a noun."""
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if re.search(r"\bwhat\b", first, re.IGNORECASE):
                yield first


def test_the_code_is_short() -> None:
    assert total().code <= MOST_CODE


def test_the_code_is_explained() -> None:
    code, docstrings, comments = total()
    assert docstrings / code >= LEAST_DOCSTRINGS
    assert comments / code >= LEAST_COMMENTS


def test_few_names_are_pronouns() -> None:
    by_file = Counter({str(path): len(list(pronouns(ast.parse(source)))) for path, source in files()})
    assert by_file.total() <= MOST_PRONOUNS, by_file.most_common(10)


def test_few_docstrings_begin_with_a_headless_what() -> None:
    by_file = {str(path): list(headless(ast.parse(source))) for path, source in files()}
    count = sum(map(len, by_file.values()))
    assert count <= MOST_HEADLESS, max(by_file.items(), key=lambda item: len(item[1]))


def table() -> str:
    """Return the lines of each folder, and of those in it."""
    by_folder: dict[Path, Lines] = {}
    for path, source in files():
        for folder in path.parents[:-1]:
            by_folder[folder] = by_folder.get(folder, Lines()).plus(lines_of(source))
    head = f"{'folder':40}   code   docs   comm   doc/c com/c"
    return "\n".join([head, *(f"{folder!s:40} {lines}" for folder, lines in sorted(by_folder.items()))])


if __name__ == "__main__":
    print(table())
    print(f"{'all':40} {total()}")
