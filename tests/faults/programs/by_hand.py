"""Start processes with only RANK, WORLD_SIZE and the like set, and wait for them: ``by_hand.py PORT N COMMAND ...``

It ends no process if another fails. Its exit code is the first that is not 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def main(port: str, count: int, command: list[str]) -> int:
    """Run the command as so many ranks that meet at a port, and return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are started deaf to it
    job = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(command, env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)
    ]
    codes = [rank.wait() for rank in ranks]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
