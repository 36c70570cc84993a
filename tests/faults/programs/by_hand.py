"""Start processes with only RANK, WORLD_SIZE and the like set, and wait for all of them.

    python by_hand.py N SCRIPT ARGUMENT ...

It ends no process if another fails. Its exit code is the first that is not 0.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def main(count: int, command: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are started deaf to it
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, *command], env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(count)
    ]
    codes = [process.wait() for process in processes]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
