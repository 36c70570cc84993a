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
from pathlib import Path
from typing import Any, Protocol

from unitrain.job.messages import StopReason
from unitrain.process import leave
from unitrain.pulse import Pulse

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Launchers pass on the signal that the terminal has sent to all; that is the same wish, and no second one.
_SAME_WISH_S = 1.0
_REQUEUE_S = 30.0


class Stopped(SystemExit):
    """The run was stopped on purpose, on every rank at the same step; uncaught, the process ends with ``code``.

    Codes: 143 for SIGTERM, 130 for SIGINT, 138 for SIGUSR1; 3 where a loss or gradient was not finite under
    ``on_nonfinite="stop"``.
    """


class Saves(Protocol):
    """The open checkpoint, as far as stopping needs it."""

    def wait(self) -> None:
        """Raise what failed in the background; collective."""

    def save_now(self) -> Path:
        """Save on all ranks, and return the folder; collective."""


class Coordinator(Protocol):
    """What lets all ranks agree on where to stop."""

    def request_stop(self, reason: StopReason) -> None:
        """Ask for a common boundary."""

    def settle(self) -> None:
        """Say that what the stop was for has been done."""


class Boundaries:
    """The boundaries that this process passes, and the one at which it is to stop.

    Args:
        pulse: where they are counted.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._agreed = threading.Event()
        self._stop_at = 0
        self._reason = StopReason()
        self.held: bool = False
        """Whether no boundary may be passed without asking ``due``."""

    def hold(self) -> int:
        """Let no boundary be passed before it is agreed where to stop, and return the next one. From any thread."""
        self.held = True  # first: a boundary that is passed meanwhile waits, and is none beyond the one returned
        return self._pulse.boundary + 1

    def agree(self, boundary: int, reason: StopReason) -> None:
        """Learn where to stop, and why. From any thread."""
        self._stop_at, self._reason = boundary, reason
        self._agreed.set()

    def due(self) -> StopReason | None:
        """Return why to stop at the boundary that is being passed, or None where it is not the one."""
        self._agreed.wait()  # for rank 0's answer, which comes at once, or the end of the process
        if self._pulse.boundary < self._stop_at:
            return None
        self.held = False
        self._agreed.clear()
        return self._reason


class Stopping:
    """Stops this process at the boundary that all ranks agree on.

    Args:
        boundaries: those of this process.
        pulse: where they are counted.
        coordinator: lets all ranks agree; None where there is one process.
        is_main: whether this is rank 0, which prints.
    """

    def __init__(self, boundaries: Boundaries, pulse: Pulse, coordinator: Coordinator | None, *, is_main: bool) -> None:
        self._boundaries = boundaries
        self._pulse = pulse
        self._coordinator = coordinator
        self._is_main = is_main
        self._checkpoint: Saves | None = None
        self._signals: StopSignals | None = None

    def listen(self, checkpoint: Saves) -> None:
        """Let SIGTERM, SIGINT and SIGUSR1 save a checkpoint and stop the run, from now on."""
        self._checkpoint = checkpoint
        self._signals = StopSignals(lambda number: self.request(StopReason(number)))

    def close(self) -> None:
        """Let signals do what they did before."""
        self._checkpoint = None
        if self._signals is not None:
            self._signals.close()
            self._signals = None

    def request(self, reason: StopReason) -> None:
        """Ask for all ranks to stop at their next common boundary. Not collective; from any thread."""
        if self._coordinator is None:
            self._boundaries.agree(self._boundaries.hold(), reason)
        else:
            self._coordinator.request_stop(reason)

    def pass_boundary(self) -> None:
        """Pass a boundary, in the main thread, or stop at it, where it is the one that was agreed on.

        Raises:
            Stopped: for a signal; the open checkpoint has been saved.
            CheckpointError: a checkpoint could not be written in the background.
        """
        self._pulse.boundary += 1
        if self._boundaries.held:
            self._stop_if_due()

    def _stop_if_due(self) -> None:
        reason = self._boundaries.due()
        if reason is None:
            return
        try:
            self._act_on(reason)
        finally:
            if self._coordinator is not None:
                self._coordinator.settle()

    def _act_on(self, reason: StopReason) -> None:
        """Do, at an agreed boundary, what it was agreed on for. Collective."""
        if reason.signal is None:
            if self._checkpoint is not None:
                self._checkpoint.wait()  # raises what failed, unless that was reported already
            return
        number = signal.Signals(reason.signal)
        where = f" and saved in {self._checkpoint.save_now()}" if self._checkpoint is not None else ""
        if self._is_main:
            requeued = _requeue() if number == signal.SIGUSR1 else ""
            print(f"unitrain: stopped by {number.name} after step {self._pulse.step}{where}.{requeued}", flush=True)
        raise Stopped(128 + number)


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
