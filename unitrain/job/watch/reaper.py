"""The reaper: a process beside a rank that is alone on its host, which kills the rank if it stalls.

A stalled rank can't end itself, and the other ranks can only kill processes of their own hosts. The reaper reads the
rank's heartbeats from a pipe, and shares its process group: what suspends the whole job suspends the reaper, too.
Run as a script, it imports neither UniTrain nor torch.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

_CHECK_S = 1.0
_ABORT_S = 1.0
_WAIT_S = 2.0
_BEAT, _LEAVE = b".", b"q"


class Reaper:
    """Starts the reaper of this process.

    Args:
        name: this process, for the message.
        patience_s: seconds without a heartbeat after which this process is killed.
    """

    def __init__(self, name: str, patience_s: float) -> None:
        arguments = [str(os.getpid()), str(patience_s), name]
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # no process could be started: the launcher or the user has to end a stalled rank
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0,
            )  # fmt: skip
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)

    def beat(self) -> None:
        """Send a heartbeat."""
        self._send(_BEAT)

    def close(self) -> None:
        """End the reaper."""
        self._send(_LEAVE)
        if self._process is not None and self._process.stdin is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_WAIT_S)
            self._process.stdin.close()

    def _send(self, message: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):  # it has been killed, or closed
                self._process.stdin.write(message)


def main(rank: int, patience_s: float, name: str) -> None:
    """Kill a process once it has sent no heartbeat for so long. Return when it has left, or has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and a launcher's signals are for the rank
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interval_s = min(_CHECK_S, patience_s / 5)
    heard_at = checked_at = time.monotonic()
    while os.getppid() == rank:
        ready, _, _ = select.select([0], [], [], interval_s)
        now = time.monotonic()
        if ready:
            heartbeats = os.read(0, 4096)
            if not heartbeats or _LEAVE in heartbeats:
                return
        if ready or now - checked_at > patience_s / 2:  # or this process was suspended, and perhaps the whole job
            heard_at = now
        checked_at = now
        if now - heard_at > patience_s:
            with suppress(OSError):
                os.write(2, f"unitrain: {name} sent no heartbeat for {now - heard_at:.0f} s: killing it.\n".encode())
            os.kill(rank, signal.SIGABRT)  # one that is not stopped prints its stacks
            time.sleep(_ABORT_S)
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
