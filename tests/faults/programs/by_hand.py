"""Start processes with only RANK, WORLD_SIZE and the like set, and wait for all of them: ``by_hand.py N COMMAND ...``

It ends no process if another fails. Its exit code is the first that is not 0.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import suppress


def free_port() -> int:
    """Return a port that Linux gives to no socket by itself: another test could get it before rank 0 listens."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def main(count: int, command: list[str]) -> int:
    """Run the command as so many ranks, and return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are started deaf to it
    port = free_port()
    job = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(command, env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)
    ]
    codes = [rank.wait() for rank in ranks]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
