"""What pages copy from files, so that it is seen wherever a page is read: differences of scripts, and source code.

``PYTHONPATH=tests/support python tests/docs/page_copies.py`` renews them. A copy stands between the comments

    <!-- diff: a script, and what it becomes -->
    <!-- end of copy -->

or, to show functions of a file, one after the other,

    <!-- source: the file, and names with dots, such as Class.method -->
    <!-- end of copy -->

Paths are relative to the top of the repository.
"""

from __future__ import annotations

import ast
import difflib
import re
from textwrap import dedent

from page_blocks import COPY, PAGES
from places import ROOT

_END = "<!-- end of copy -->"


def renewed(text: str) -> str:
    """Return a page with its copies renewed."""
    return re.sub(rf"(?P<head>{COPY.pattern}\n).*?(?={_END})", _copy, text, flags=re.DOTALL)


def _copy(match: re.Match[str]) -> str:
    kind, (file, *names) = match["kind"], match["of"].split()
    language, lines = ("diff", _difference(file, *names)) if kind == "diff" else ("python", _source(file, names))
    return f"{match['head']}```{language}\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"


def _difference(first: str, second: str) -> list[str]:
    before, after = ((ROOT / name).read_text(encoding="utf-8").splitlines() for name in (first, second))
    # Without the lines that name the files and count.
    return list(difflib.unified_diff(before, after, n=len(before), lineterm=""))[3:]


def _source(file: str, names: list[str]) -> list[str]:
    source = (ROOT / file).read_text(encoding="utf-8")
    parts = [ast.get_source_segment(source, _node(ast.parse(source), name), padded=True) or "" for name in names]
    return "\n\n".join(dedent(part) for part in parts).splitlines()


def _node(tree: ast.AST, name: str) -> ast.AST:
    """Return a function or class of a module, given its name with dots."""
    for part in name.split("."):
        tree = next(node for node in ast.iter_child_nodes(tree) if getattr(node, "name", "") == part)
    return tree


if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if renewed(text) != text:
            page.write_text(renewed(text), encoding="utf-8")
