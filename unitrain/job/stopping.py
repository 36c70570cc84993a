"""How a run ends before its time, on all ranks at the same boundary, with what it has done saved.

A signal is noted down by a thread and agreed on beside training: rank 0's hub asks every rank which boundary it has
yet to pass, and names the furthest of them. No rank is beyond it, and each can come to it, so all stop there.
Boundaries are counted; they are the ends of optimizer steps, where a loader's next batch is asked for, and each batch
of an evaluation.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unitrain.process import leave

if TYPE_CHECKING:
    from unitrain.strategy import Strategy

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Launchers pass on the signal that the terminal has sent to all; that is the same wish, and no second one.
_SAME_WISH_S = 1.0
_REQUEUE_S = 30.0


class Stopped(SystemExit):
    """The run was stopped on purpose, on every rank at the same step; uncaught, the process ends with ``code``.

    Codes: 143 for SIGTERM, 130 for SIGINT, 138 for SIGUSR1; 3 where a loss or gradient was not finite under
    ``on_nonfinite="stop"``.
    """


class Stopping:
    """The boundaries that this process passes, and the one at which it shall stop.

    Args:
        strategy: what runs.

    Attributes:
        boundary: how many it has passed.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.boundary: int = 0
        self._strategy = strategy
        self._signals: StopSignals | None = None
        self._held = False
        self._agreed = threading.Event()
        self._stop_at = 0
        self._reason: dict[str, Any] = {}

    def listen(self) -> None:
        """Let SIGTERM, SIGINT and SIGUSR1 stop the run from now on."""
        self._signals = StopSignals(lambda number: self.request({"signal": number}))

    def close(self) -> None:
        """Let signals do what they did before."""
        if self._signals is not None:
            self._signals.close()
            self._signals = None

    def request(self, reason: dict[str, Any]) -> None:
        """Ask for all ranks to stop at their next common boundary. Not collective; from any thread.

        Args:
            reason: ``{"signal": number}``, or ``{"checkpoint": "failed"}`` where one could not be written meanwhile.
        """
        if self._strategy.watch is None:
            self.agree(self.hold(), reason)
        else:
            self._strategy.watch.request_stop(reason)

    def pass_boundary(self) -> None:
        """Pass a boundary, in the main thread, or stop at it, where it is the one that was agreed on.

        Raises:
            Stopped: for a signal; the open checkpoint has been saved.
            CheckpointError: a checkpoint could not be written in the background.
        """
        self.boundary += 1
        if not self._held:
            return
        self._agreed.wait()  # for rank 0's answer, which comes at once, or the end of the process
        if self.boundary < self._stop_at:
            return
        self._held = False
        self._agreed.clear()
        try:
            _act_on(self._strategy, self._reason)
        finally:
            if self._strategy.watch is not None:
                self._strategy.watch.settle()

    def hold(self) -> int:
        """Let no boundary be passed before it is agreed where to stop, and return the next one. From any thread."""
        self._held = True  # first: a boundary that is passed meanwhile waits, and is none beyond the one returned
        return self.boundary + 1

    def agree(self, boundary: int, reason: dict[str, Any]) -> None:
        """Learn where to stop, and why. From any thread."""
        self._stop_at, self._reason = boundary, reason
        self._agreed.set()


class StopSignals:
    """Turns SIGTERM, SIGINT and SIGUSR1 into a call of ``request``, in a thread; a second signal ends the process.

    A thread is told by the interpreter's wake-up descriptor, for Python's own handlers wait until the main thread comes
    back from a collective. A handler of the user's is left in place.

    Args:
        request: is given the signal's number.
    """

    def __init__(self, request: Callable[[int], None]) -> None:
        self._request = request
        self._replaced: dict[int, Any] = {}
        self._wakeup_before = -1
        if threading.current_thread() is not threading.main_thread():
            return  # where signals can't be handled
        own = [n for n in _SIGNALS if signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)]
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._replaced = {number: signal.signal(number, _wake_up) for number in own}
        _set_up.add(self)
        self._thread = threading.Thread(target=self._listen, name="unitrain signals", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        first_at = 0.0
        while numbers := self._receiver.recv(64):
            for number in numbers:
                if number not in self._replaced:
                    continue
                if not first_at:
                    first_at = time.monotonic()
                    self._request(number)
                elif time.monotonic() - first_at > _SAME_WISH_S:
                    leave(128 + number, f"unitrain: a second {signal.Signals(number).name}: ended at once.")

    def close(self) -> None:
        """Put everything back as it was."""
        if self._replaced:
            self.restore()
            self._sender.shutdown(socket.SHUT_WR)  # closing would not do: a forked process may have a copy
            self._thread.join()
            self._sender.close()
            self._receiver.close()

    def restore(self) -> None:
        """Put the handlers back."""
        if self._replaced:
            signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced = {}


_set_up: weakref.WeakSet[StopSignals] = weakref.WeakSet()


def _forget_in_child() -> None:
    """Let a forked process answer to signals as if nothing had been: its wake-ups would be taken for its parent's."""
    for signals in _set_up:
        signals.restore()


os.register_at_fork(after_in_child=_forget_in_child)


def _wake_up(number: int, frame: object) -> None:
    """Do nothing: that there is a handler is what makes the interpreter write to its wake-up descriptor."""


def _act_on(strategy: Strategy, reason: dict[str, Any]) -> None:
    """Do, at an agreed boundary, what it was agreed on for. Collective."""
    checkpoint = strategy.open_checkpoint
    if "signal" not in reason:
        if checkpoint is not None:
            checkpoint.wait()  # raises what failed, unless that was told already
        return
    number = signal.Signals(reason["signal"])
    where = f" and saved in {checkpoint.save_now()}" if checkpoint is not None else ""
    if strategy.is_main:
        requeued = _requeue() if number == signal.SIGUSR1 else ""
        strategy.print(f"unitrain: stopped by {number.name} after step {strategy.steps}{where}.{requeued}")
    raise Stopped(128 + number)


def _requeue() -> str:
    """Let SLURM put this job back into its queue, and return what to say of it: nothing outside SLURM."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return ""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=_REQUEUE_S, check=True)
    except subprocess.CalledProcessError as error:
        return f" SLURM did not requeue job {job}: {error.stderr.strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f" SLURM did not requeue job {job}: {error}"
    return f" SLURM has requeued job {job}."
