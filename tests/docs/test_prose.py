"""The length of the README and the pages, and how often they and the code use phrases that are hard to read.

Each number is what was reached: lower it when you remove a phrase, and name the noun again instead of raising it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_blocks import PAGES
from places import ROOT

CODE = [path for folder in ("unitrain", "backends") for path in sorted((ROOT / folder).rglob("*.py"))]
README_WORDS, DOCS_WORDS = 700, 45_366
# For each phrase, how often the pages have it, and how often the code.
MOST = {
    "that of": (0, 27),
    "those of": (1, 27),
    "of which": (0, 13),
    "in which": (3, 26),
    "whose": (7, 35),
    "it is none": (0, 2),
    "there is none": (1, 9),
    "for ever": (0, 1),
    "in vain": (0, 2),
    "be it": (0, 0),
    "all the same": (0, 0),
    "alike": (0, 7),
    "elsewhere": (0, 3),
    "of its own": (2, 15),
    "of their own": (0, 3),
    "not finite": (2, 8),
    "goes on|go on|went on": (0, 18),
    "whoever|somebody": (0, 1),
    "if need be": (0, 1),
    "without a word": (1, 0),
}


def words(path: Path) -> int:
    """Count words as wc -w does."""
    return len(path.read_text(encoding="utf-8").split())


def test_the_readme_is_short() -> None:
    assert words(ROOT / "README.md") <= README_WORDS


def test_the_pages_are_short() -> None:
    assert sum(map(words, PAGES[1:])) <= DOCS_WORDS


@pytest.mark.parametrize(("phrase", "most"), MOST.items(), ids=str)
def test_a_phrase_is_rare(phrase: str, most: tuple[int, int]) -> None:
    pattern = re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE)
    for kind, paths, allowed in (("pages", PAGES, most[0]), ("code", CODE, most[1])):
        found = {str(path.relative_to(ROOT)): len(pattern.findall(_on_one_line(path))) for path in paths}
        by_count = sorted(((count, path) for path, count in found.items() if count), reverse=True)
        assert sum(found.values()) <= allowed, f"{phrase!r} is too frequent in {kind}: {by_count[:10]}"


def _on_one_line(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").replace("#", " ").split())
