"""The exit watch: ends a process that does not exit although its script has ended.

A thread that is not a daemon, an exit handler that waits, or output that nobody reads keeps a process, and
with it the launcher and the machines of the job.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from contextlib import suppress

from unitrain.process import exit_now, print_stacks
from unitrain.pulse import USER_CODE, Pulse

_CHECK_S = 1.0
_watch: ExitWatch | None = None


def watch_exit(name: str, pulse: Pulse, end_s: float) -> None:
    """Start the exit watch of this process, or give the running one these arguments.

    Args:
        name: this process, for the messages.
        pulse: what this process is doing: while it trains in another thread, or waits for other ranks, it may stay.
        end_s: seconds from the end of the script to the end of the process.
    """
    global _watch
    # A process that opens a second strategy keeps its thread.
    if _watch is None:
        _watch = ExitWatch()
        threading.Thread(target=_watch.run, name="unitrain exit watch", daemon=True).start()
        # Not by Python, after the watch has ended: the reader of stdout may have stopped.
        atexit.register(_flush)
    _watch.name, _watch.pulse, _watch.end_s = name, pulse, end_s


def _flush() -> None:
    """Write out what stdout still holds. An exit handler."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()


class ExitWatch:
    """Waits for the end of the script, and then for the end of the process; see ``watch_exit``."""

    name: str = ""
    pulse: Pulse = Pulse()
    end_s: float = float("inf")

    def run(self) -> None:
        """Run until the process has exited, or end it."""
        waited_s, last_state = 0.0, self._state()
        while waited_s < self.end_s:
            time.sleep(_CHECK_S)
            waited_s += _CHECK_S  # by this clock, a suspended process does not wait
            # A script may train in a thread that is no daemon, after its main thread has ended.
            if _script_runs() or self._state() != last_state or self.pulse.phase != USER_CODE:
                last_state, waited_s = self._state(), 0.0
        print_stacks(f"unitrain: stacks of {self.name} when it was ended:")
        exit_now(
            1,
            f"unitrain: {self.name}: stopped because it did not exit within {self.end_s:g} s (timeout_s): it waits for "
            f"{_reason()}. Make such threads daemons or end them, and let exit handlers wait for a limited time.",
        )

    def _state(self) -> tuple[str, int, int]:
        """Return a state that changes whenever this process calls the library."""
        return self.pulse.phase, self.pulse.calls, self.pulse.boundary


def _script_runs() -> bool:
    """Return whether the main thread runs Python code, except for exit handlers."""
    main = threading.main_thread()
    return main.is_alive() and main.ident in sys._current_frames()  # no frame: it writes out what stdout still holds


def _reason() -> str:
    """Return a description of the threads, or else of the exit handlers, that keep this process from exiting."""
    main = threading.main_thread()
    threads = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    if threads:
        return f"threads that are not daemons: {', '.join(threads)}"
    return "an exit handler, or the reader of its stdout"
