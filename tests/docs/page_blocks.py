"""The code blocks of a page, by section, and the comments above them that say how a test runs them.

A comment directly above a block is one of

    <!-- not run: the reason -->
    <!-- answered with: what is typed into them -->

and a comment may hold Python that the blocks after it need, and that readers don't:

    <!-- python
    strategy = unitrain.init()
    -->

A block with a title (```python title="train.py") is a file, and a text block is what the commands above it print, with
other numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from places import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COPY = re.compile(r"<!-- (?P<kind>diff|source): (?P<of>.+?) -->")


@dataclass(frozen=True)
class Block:
    """A code block, or a comment with Python.

    Attributes:
        place: page and line.
        section: the number of second-level headings above it.
        language: the first word after the fence, or an empty string.
        title: the name of the file that the block is.
        text: what it holds.
        not_run: why it is not run; an empty string if it is.
        answer: what its commands get from stdin.
        copy: whether it is copied from files that are tested themselves (``page_copies``).
    """

    place: str
    section: int
    language: str
    title: str
    text: str
    not_run: str = ""
    answer: str = ""
    copy: bool = False


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Return the blocks of a page."""
    return tuple(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    comment, section = "", 0
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        place = f"{page.relative_to(ROOT)}:{token.map[0] + 1}" if token.map else ""
        if token.type == "html_block":
            comment = token.content.strip()
            if hidden := re.fullmatch(r"<!-- python\n(.*?)-->", comment, re.DOTALL):
                yield Block(place, section, "python", "", hidden[1])
        elif token.type == "fence":
            language, _, rest = token.info.partition(" ")
            title = re.search(r'title="(.+?)"', rest)
            says = dict(re.findall(r"<!-- (not run|answered with): (.+?) -->", comment, re.DOTALL))
            yield Block(
                place,
                section,
                language,
                title[1] if title else "",
                token.content,
                " ".join(says.get("not run", "").split()),
                says.get("answered with", ""),
                COPY.fullmatch(comment) is not None,
            )
            comment = ""
        elif token.type == "code_block" and "```" in token.content:
            raise ValueError(f"{place}: this block is indented, and would not be found")
        elif token.block and token.level == 0:
            comment = ""
            section += token.type == "heading_open" and token.tag == "h2"
