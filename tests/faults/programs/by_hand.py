"""Start processes with only RANK, WORLD_SIZE and the like set, and wait for all of them: ``by_hand.py N COMMAND ...``

It ends no process if another fails. Its exit code is the first that is not 0.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def main(count: int, command: list[str]) -> int:
    """Run the command as so many ranks, and return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are started deaf to it
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(command, env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)
    ]
    codes = [rank.wait() for rank in ranks]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
