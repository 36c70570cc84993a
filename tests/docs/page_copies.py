"""Scripts and differences that pages copy from other files, so that they show wherever a page is read.

``PYTHONPATH=tests/support python tests/docs/page_copies.py`` renews them. A copy stands between two comments. The first
is one of

    <!-- file: a script -->
    <!-- diff: a script, and what it becomes -->

and the second ``<!-- end of copy -->``. Paths are relative to the top of the repository.
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
    kind, files = match[2], [(ROOT / name).read_text(encoding="utf-8") for name in match[3].split()]
    if kind == "file":
        return f"{match['head']}```python\n{files[0]}```\n"
    before, after = (file.splitlines() for file in files)
    # Without the lines that name the files and count.
    lines = list(difflib.unified_diff(before, after, n=len(before), lineterm=""))[3:]
    return f"{match['head']}```diff\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"


if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if renewed(text) != text:
            page.write_text(renewed(text), encoding="utf-8")
