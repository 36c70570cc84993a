"""The commands of a page that are for several hosts, as a test runs them on the hosts of ``cluster.py``.

They stay as they are, with the page's options. Replaced are only the names of hosts, the script, and numbers of
processes: those are of hosts with eight each.

A line ``# on node2`` says where the command below it is started. Without, torchrun is started on each host, and another
launcher on the first.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from page_blocks import PAGES, Block, blocks

_HOST = re.compile(r"\bnode\d\b")
_PROCESSES = re.compile(r"\b(?:8|16|24|32)\b")
_ON = "# on "
# What mpirun wants of root, whom the tests need for their hosts.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def blocks_for(test: Path) -> list[Block]:
    """Return the blocks of all pages of which the page says that this test runs them."""
    return [block for page in PAGES for block in blocks(page) if block.not_run.startswith(test.name)]


def on_hosts(text: str, hosts: Sequence[str], *, processes: int = 2) -> str:
    """Return a block with the names of these hosts, in the same order, and this number of processes of each."""
    named = dict(zip(sorted(set(_HOST.findall(text))), hosts, strict=False))
    text = _HOST.sub(lambda name: named[name[0]], text)
    return _PROCESSES.sub(lambda number: str(int(number[0]) // 8 * processes), text)


def host_commands(
    text: str, hosts: Sequence[str], script: Sequence[str], *, processes: int = 2
) -> list[tuple[int, list[str]]]:
    """Return the commands of a block, each with the number of the host that it is started on.

    Args:
        text: the block.
        hosts: the names of hosts that replace those of the block, in the same order.
        script: what replaces train.py.
        processes: the number of processes of a host.
    """
    on, found = "", []
    for line in on_hosts(text, hosts, processes=processes).replace("\\\n", " ").splitlines():
        if line.startswith(_ON):
            on = line.removeprefix(_ON)
            continue
        words = shlex.split(line, comments=True)
        if "train.py" in words:
            at = words.index("train.py")
            words[at : at + 1] = script
        if words:
            everywhere = range(len(hosts)) if words[0] == "torchrun" else [0]
            found += [(host, words) for host in ([hosts.index(on)] if on else everywhere)]
    return found
