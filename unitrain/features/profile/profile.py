"""``Profile``: records a few steps with torch's profiler, at once or on a signal."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from unitrain.communication.communicator import Communicator
from unitrain.errors import UsageError
from unitrain.features.profile.recording import ProfilePlan, Recording
from unitrain.process import print_stderr
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets
from unitrain.url import is_url

_REQUEST = "profile"


@dataclass(eq=False)
class Profile(Feature):
    """Records a few of the next steps with torch's profiler, on several ranks, in one trace. Adding it is collective.

    Rank 0 writes ``trace-stepN.json.gz``, named by the first step, for https://ui.perfetto.dev. Each rank is a process
    in it, with the clocks of all hosts aligned. What UniTrain does is marked ``unitrain: …``.

    Args:
        folder: a path.
        steps: number of steps to record; with ``local_sgd.steps``, of rounds.
        skip: number of steps before them; the last of these warms the profiler up.
        ranks: the ranks to record; all by default.
        memory: show in the trace how much memory torch has allocated. Each of these ranks with an NVIDIA GPU also
            writes ``memory-stepN-rankR.pickle``, for https://pytorch.org/memory_viz.
        on_signal: a signal, such as ``signal.SIGUSR2``. The profile begins whenever a process of the job gets it, and
            not when it is added.

    Raises:
        UsageError: when it is added: an argument is out of range, another profile has not ended, or the signal has a
            handler.

    Example:
        >>> strategy.add(Profile("runs/a", steps=4, skip=4))
    """

    folder: str | Path
    _: KW_ONLY
    steps: int = 4
    skip: int = 4
    ranks: Sequence[int] | None = None
    memory: bool = False
    on_signal: int | None = None
    _closed: bool = field(default=False, init=False)

    def plug_in(self, sockets: Sockets) -> None:
        """Begin, or wait for the signal."""
        self._sockets = sockets
        ranks = range(sockets.communicator.world_size) if self.ranks is None else self.ranks
        self._plan = ProfilePlan(self.folder, self.steps, self.skip, ranks, self.memory)
        if self.on_signal is None and self._is_recording:
            raise UsageError("a profile was added while another profile has not ended: add it later.")
        _check(self._plan, sockets.communicator)
        if self.on_signal is None:
            self._begin()
        else:
            self._listen(signal.Signals(self.on_signal))

    @property
    def _is_recording(self) -> bool:
        """Whether any profile is recording: torch has one profiler."""
        return any(isinstance(hook, Recording) for hook in self._sockets.hooks)

    def _begin(self) -> None:
        if not self._is_recording:
            self._sockets.hooks.add_hook(Recording(self._sockets.communicator, self._sockets.hooks, self._plan))

    def _listen(self, number: signal.Signals) -> None:
        """Begin on all ranks, at the same boundary, whenever this process gets a signal."""
        # Another's handler may be what stops or requeues the job.
        if signal.getsignal(number) is not signal.SIG_DFL:
            raise UsageError(f"profile: {number.name} has a handler already (submitit's, say): choose another signal.")
        self._sockets.stopping.add_action(_REQUEST, lambda _: self._begin())
        self._sockets.hooks.add_hook(self)
        signal.signal(number, self._request)
        if self._sockets.communicator.is_main:
            command = f"kill -{number.name.removeprefix('SIG')} {os.getpid()} on {platform.node()}"
            print_stderr(f"unitrain: {command} begins a profile of all ranks.")

    def _request(self, *_: Any) -> None:
        if not self._closed:  # in a thread: this one may hold a lock that sending takes
            Thread(target=self._sockets.stopping.request, args=(_REQUEST,), daemon=True).start()

    def at_close(self) -> None:
        """Ignore the signal from now on."""
        self._closed = True
        self._sockets.stopping.remove_action(_REQUEST)


def _check(plan: ProfilePlan, communicator: Communicator) -> None:
    """Raise UsageError unless a profile can be made as planned, and create its folder. Collective."""
    folder, steps, skip, ranks, _ = plan

    def make_folder() -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"profile: can't create {folder}: {error.strerror}.") from error

    if min(steps, skip) < 1 or not ranks or not {*ranks} <= {*range(communicator.world_size)} or is_url(folder):
        raise UsageError(
            "a profile takes a folder on a disk, a number of steps and of steps to skip, both at least 1, and some "
            f"ranks from 0 to {communicator.world_size - 1}, not {folder}, {steps}, {skip} and {list(ranks)}."
        )
    communicator.on_main(make_folder)  # which writes the trace; all ranks learn of an error
