"""Start processes with only RANK, WORLD_SIZE and the like set, and wait for all of them.

    python by_hand.py [--fork] N SCRIPT ARGUMENT ...

With --fork, torch is imported once, and the processes are forked: much faster on few cores. It ends no process if
another fails. Its exit code is the first that is not 0.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path


def variables(count: int, rank: int, port: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(count: int, command: list[str]) -> list[int]:
    """Run the command in new processes, and return their exit codes."""
    port = free_port()
    processes = [
        subprocess.Popen([sys.executable, *command], env={**os.environ, **variables(count, rank, port)})
        for rank in range(count)
    ]
    return [process.wait() for process in processes]


def fork(count: int, command: list[str]) -> list[int] | None:
    """Fork processes, and return their exit codes. In a forked process, return None: it is to run the script."""
    for name in ("torch._dynamo", "unitrain.initialize", "unitrain.data"):
        import_module(name)
    port = free_port()
    forked = []
    for rank in range(count):
        forked.append(os.fork())
        if forked[-1] == 0:
            os.environ.update(variables(count, rank, port))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv, sys.path[0], globals()["__file__"] = command, str(Path(command[0]).parent), command[0]
            return None
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forked]


def main() -> list[int] | None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are started deaf to it
    _, *options, count, script = sys.argv[: 3 + ("--fork" in sys.argv[:2])]
    command = [script, *sys.argv[3 + len(options) :]]
    return fork(int(count), command) if options else start(int(count), command)


if __name__ == "__main__":
    codes = main()
    if codes is not None:
        sys.exit(next((code if code > 0 else 128 - code for code in codes if code), 0))
    # Here, so that the process ends as one that was started with the script.
    exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec"))
