"""The differences of scripts that pages show, so that they are seen wherever a page is read.

``PYTHONPATH=tests/support python tests/docs/page_copies.py`` renews them. A copy stands between the comments

    <!-- diff: a script, and what it becomes -->
    <!-- end of copy -->

Paths are relative to the top of the repository.
"""

from __future__ import annotations

import difflib
import re

from page_blocks import COPY, PAGES
from places import ROOT

_END = "<!-- end of copy -->"


def renewed(text: str) -> str:
    """Return a page with its copies renewed."""
    return re.sub(rf"(?P<head>{COPY.pattern}\n).*?(?={_END})", _copy, text, flags=re.DOTALL)


def _copy(match: re.Match[str]) -> str:
    before, after = ((ROOT / name).read_text(encoding="utf-8").splitlines() for name in match[2].split())
    # Without the lines that name the files and count.
    lines = list(difflib.unified_diff(before, after, n=len(before), lineterm=""))[3:]
    return f"{match['head']}```diff\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"


if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if renewed(text) != text:
            page.write_text(renewed(text), encoding="utf-8")
