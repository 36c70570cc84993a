"""Stops a run early, on all ranks at the same boundary, after saving a checkpoint.

A thread receives the signal, and the ranks agree on a boundary while training continues: rank 0's hub asks every rank
for its next boundary, and chooses the furthest. No rank has passed it, and each will reach it, so all stop there.
Boundaries are counted. They are the points where a loader is asked for the next step's batch, each batch of an
evaluation, and, without a loader, the ends of optimizer steps.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard

from unitrain.job.watch.boundaries import Boundaries
from unitrain.job.watch.messages import BoundaryRequest, Message, RequestStop, Settled
from unitrain.launch.local.toolchain import run_to_end
from unitrain.process import exit_now, print_stdout
from unitrain.pulse import Pulse

Handler = Callable[[int, Any], object]
"""A handler of a signal."""
SIGNAL = "signal"
"""Request: save, and end the run because of the signal with this number."""
RAISE_ERROR = "raise_error"
"""Request: raise the error of a checkpoint that could not be written in the background."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# The terminal sends Ctrl-C to all processes, and launchers forward it: signals this close together are the same one.
_SAME_SIGNAL_S = 1.0
_SCONTROL_S = 30.0


class Stopped(SystemExit):
    """Raised on every rank, at the same step, when the run is stopped. If uncaught, the process exits with ``code``.

    Codes: 143 for SIGTERM, 130 for SIGINT, 138 for SIGUSR1, and 140 for SIGUSR2 under submitit, where rank 0 exits
    with submitit's code; 3 if a loss or gradient was NaN or infinite, with ``on_nonfinite="stop"``.
    """


class Saves(Protocol):
    """The open checkpoint, as far as a stop needs it."""

    def wait(self) -> None:
        """Wait for the background writer, and raise its error. Collective."""

    def save_now(self) -> str:
        """Save a checkpoint, wait for it, and return where it is. Collective."""

    def close(self) -> None:
        """Wait for the background writer, and end it. Collective."""

    def abandon(self) -> None:
        """End the background writer, without waiting for it. Not collective."""


class Stopping:
    """Stops this process at the boundary that all ranks have agreed on.

    Args:
        boundaries: where this process can stop.
        pulse: counts them.
        send: sends a message to the hub; None in a world of one, which has no hub.
        is_main: whether this is rank 0, which prints.

    Attributes:
        boundaries: as the argument.
        checkpoint: the open checkpoint; None if there is none.
        outer: within a trial, the checkpoint that is open outside of it: signals are received until that is closed.
        round_began: when the round began that the script is in; None outside of rounds.
    """

    def __init__(
        self, boundaries: Boundaries, pulse: Pulse, send: Callable[[Message], None] | None, *, is_main: bool
    ) -> None:
        self.boundaries: Boundaries = boundaries
        self._pulse = pulse
        self._send = send
        self._is_main = is_main
        self.checkpoint: Saves | None = None
        self.outer: Saves | None = None
        self._signals: StopSignals | None = None
        self._lock = threading.Lock()
        self._actions: dict[str, Callable[[int], None]] = {
            SIGNAL: self._end_by_signal,
            RAISE_ERROR: lambda _: self._raise_error(),
        }
        self.round_began: float | None = None
        self._delayed: BoundaryRequest | None = None  # waits for its end

    def add_action(self, kind: str, action: Callable[[int], None]) -> None:
        """Add something that all ranks do at a boundary whenever it is requested, after the round that they are in.

        Args:
            kind: names the requests for it.
            action: called on every rank, at the same boundary, with the number of the request. It may communicate.
        """
        self._actions[kind] = action

    def listen(self, checkpoint: Saves) -> None:
        """From now on, save a checkpoint and stop the run on SIGTERM, SIGINT and SIGUSR1."""
        self.checkpoint = checkpoint
        self._signals = self._signals or StopSignals(self._receive)

    def close(self, checkpoint: Saves | None = None) -> None:
        """Leave a checkpoint, and restore the previous signal handlers unless another one is open.

        Args:
            checkpoint: the checkpoint, which may be of a trial that has ended; None for any.
        """
        if checkpoint in (None, self.checkpoint):
            self.checkpoint = None
        if self._signals is not None and self.checkpoint is None and self.outer is None:
            self._signals.close()
            self._signals = None

    def request(self, kind: str, number: int = 0) -> None:
        """Ask all ranks to act at their next common boundary. Not collective; from any thread.

        Args:
            kind: of the action: ``SIGNAL``, ``RAISE_ERROR``, or one that was added.
            number: the action's argument.
        """
        request = BoundaryRequest(kind, number)
        # Every rank may send the same one, as for a signal to all: the hub drops those that it has.
        if self._send is not None:
            self._send(RequestStop(request))
            return
        with self._lock:
            self.boundaries.agree(self.boundaries.hold(), request)

    def pass_boundary(self) -> None:
        """Pass a boundary, or stop if it is the one that was agreed on. In the main thread only."""
        self._pulse.boundary += 1
        if self.boundaries.held:
            self.stop_if_due()

    @contextmanager
    def round(self) -> Iterator[None]:
        """Delay requests, except for an error, to the first boundary after the block. It begins at one. Collective."""
        self.pass_boundary()  # what was requested before it does not wait
        self.round_began = time.monotonic()
        try:
            yield
        finally:
            self.round_began = None
            if self._delayed is not None:  # the ranks have agreed on an earlier boundary
                self.boundaries.agree(self.boundaries.hold(), self._delayed)
                self._delayed = None

    def _receive(self, number: int) -> None:
        """Ask all ranks to stop because of a signal, and say if it waits for the end of a round. In a thread."""
        began = self.round_began
        if began is not None and self._is_main:
            print_stdout(
                f"unitrain: {signal.Signals(number).name} waits for the end of a round, which is saved whole or not at "
                f"all. It began {time.monotonic() - began:.0f} s ago. A second signal ends the run at once, and the "
                "round is repeated when it is resumed."
            )
        self.request(SIGNAL, number)

    def stop_if_due(self) -> None:
        """Wait until the ranks have agreed on a boundary, and act if it is this one. Collective."""
        request = self.boundaries.due()
        if request is None:
            return
        if self.round_began is not None and request.kind != RAISE_ERROR:
            self._delayed = request
            return
        try:
            if request.kind in self._actions:
                self._actions[request.kind](request.number)
        finally:
            # Also after an error: the hub would never answer the next request.
            if self._send is not None:
                self._send(Settled())

    def _raise_error(self) -> None:
        """Raise the error of the background writer, unless it was raised already. Collective."""
        if self.checkpoint is not None:
            self.checkpoint.wait()

    def _end_by_signal(self, received: int) -> None:
        """Save a checkpoint, and end the run because of a signal. Collective.

        Args:
            received: the number of the signal.

        Raises:
            Stopped: always, on every rank.
        """
        number = signal.Signals(received)
        resubmit = self._signals.resubmit.get(number) if self._signals is not None else None
        where = f" and saved in {self.checkpoint.save_now()}" if self.checkpoint is not None else ""
        if self._is_main:
            # SLURM sends SIGUSR1 before the time limit if the script asks for it (--signal), and SIGTERM when it
            # preempts.
            requeues = number == signal.SIGUSR1 or (number == signal.SIGTERM and _is_preempted())
            requeued = _requeue() if requeues and resubmit is None else ""
            step = f"step {self._pulse.step}{self._pulse.of_trial}"
            print_stdout(f"unitrain: stopped by {number.name} after {step}{where}.{requeued}")
        # submitit's handler requeues the job itself, so UniTrain must not do it as well.
        if resubmit is not None:
            try:
                resubmit(number, None)  # on rank 0 it requeues the job and exits
            except SystemExit as end:
                raise Stopped(end.code) from end
        raise Stopped(128 + number)


class StopSignals:
    """Calls ``request`` in a thread on SIGTERM, SIGINT and SIGUSR1. A second signal ends the process.

    Under SLURM, a second SIGTERM does not: SLURM sends another one when a job that was warned comes to its end, and
    leaves time to save until SIGKILL.

    The thread reads the interpreter's wake-up descriptor, since Python runs signal handlers only when the main thread
    has returned from a collective. Handlers that the script has installed are left in place, except for submitit's.

    submitit sends its jobs a signal (SIGUSR2, if not set otherwise) before their time limit, and when they are
    preempted. Its handler requeues the job and ends the process wherever it is, so it must wait until the run is saved.

    Attributes:
        resubmit: submitit's handlers, by signal, which are called when the run has been saved.
    """

    def __init__(self, request: Callable[[int], None]) -> None:
        self._request = request
        self._replaced: dict[int, Any] = {}
        self.resubmit: dict[int, Handler] = {}
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread can set signal handlers
        # A handler of the script's own would no longer be called if another took its place.
        free = (signal.SIG_DFL, signal.default_int_handler, _wake_up)
        unhandled = [number for number in _SIGNALS if signal.getsignal(number) in free]
        handlers = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGUSR2)}
        self.resubmit = {number: handler for number, handler in handlers.items() if _is_submitits(handler)}
        if not unhandled and not self.resubmit:
            return
        self._receiver, self._sender = socket.socketpair()
        # As set_wakeup_fd demands: a signal handler must not block.
        self._sender.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._replaced = {number: signal.signal(number, _wake_up) for number in (*unhandled, *self.resubmit)}
        _set_up.add(self)
        self._thread = threading.Thread(target=self._listen, name="unitrain signals", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        """Call ``request`` for the first signal, and end the process at a second. Runs in a thread, until ``close``."""
        first_at = 0.0
        while numbers := self._receiver.recv(64):  # a byte for each signal
            for number in numbers:
                if number not in self._replaced:
                    continue
                if not first_at:
                    first_at = time.monotonic()
                    self._request(number)
                elif number == signal.SIGTERM and _slurm_job() is not None:
                    continue  # SLURM's: the time is up, or a step beside this one has requeued the job. SIGKILL follows
                elif time.monotonic() - first_at > _SAME_SIGNAL_S:
                    name = signal.Signals(number).name
                    exit_now(128 + number, f"unitrain: received a second {name}: exiting at once.")

    def close(self) -> None:
        """Restore the signal handlers, and end the thread. SIGUSR1 is ignored if nothing but UniTrain handled it.

        A warning of the end of the time limit would else kill a process that has finished its training.
        """
        if self._replaced:
            ignored = self._replaced.get(signal.SIGUSR1) is signal.SIG_DFL
            self.restore()
            if ignored:
                signal.signal(signal.SIGUSR1, _wake_up)  # unlike SIG_IGN, programs that are started don't inherit it
            self._sender.shutdown(socket.SHUT_WR)  # closing would not do: a forked process may have a copy
            self._thread.join()
            self._sender.close()
            self._receiver.close()

    def restore(self) -> None:
        """Restore the signal handlers, and the wake-up descriptor that the script may have set."""
        # The wake-up descriptor is process-wide, as the handlers are.
        if self._replaced:
            signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced = {}


_set_up: weakref.WeakSet[StopSignals] = weakref.WeakSet()


def _forget_in_child() -> None:
    """Restore signal handlers in a forked child: its wake-ups would go to the parent's thread."""
    for signals in _set_up:
        signals.restore()


os.register_at_fork(after_in_child=_forget_in_child)


def _wake_up(number: int, frame: object) -> None:
    """Do nothing: the interpreter writes to its wake-up descriptor only if a handler is set."""


def _is_submitits(handler: object) -> TypeGuard[Handler]:
    """Return whether a signal handler is submitit's that requeues a job. Its others only log the signal."""
    owner = type(getattr(handler, "__self__", None))
    is_submitit = any(base.__module__.split(".")[0] == "submitit" for base in owner.__mro__)
    return is_submitit and str(getattr(handler, "__name__", "")).startswith("checkpoint_and")


def _slurm_job() -> str | None:
    """Return the name of this SLURM job, or None outside SLURM.

    SLURM_JOB_ID of one task of a job array names the array as well.
    """
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def _is_preempted() -> bool:
    """Return whether SLURM is preempting this job, and has left it time to save.

    SLURM requeues the job when that time is over, but takes a job that has ended before for a failed one.
    """
    job = _slurm_job()
    if job is None:
        return False
    _, shown = run_to_end("scontrol", "show", "job", job, timeout_s=_SCONTROL_S)
    return re.search(r"\bPreemptTime=\d", shown) is not None


def _requeue() -> str:
    """Requeue this SLURM job, and return a message about it; an empty string outside SLURM."""
    job = _slurm_job()
    if job is None:
        return ""
    code, output = run_to_end("scontrol", "requeue", job, timeout_s=_SCONTROL_S)
    if code and "pending execution" not in output:  # else another step of this job has requeued it
        return f" SLURM did not requeue job {job}: {output.strip()}"
    return f" SLURM has requeued job {job}."
