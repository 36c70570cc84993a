"""``Trackers``: logs metrics to several trackers, on rank 0 and without waiting for them."""

from __future__ import annotations

import atexit
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from unitrain.errors import ConfigError, UsageError
from unitrain.features.trackers.libraries import LIBRARIES
from unitrain.process import print_stderr
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets
from unitrain.url import is_url

_IDS = "trackers.json"
_CLOSE_S = 20.0  # the other ranks wait meanwhile


class Tracker(Protocol):
    """Records the metrics of one run somewhere. All methods are called in one thread, one after another.

    A method may take long, and may raise any exception: training does not wait for it, and continues.
    """

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Record the run's settings. Also called when the run continues, perhaps with other values."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics by the optimizer step. After a resume, steps may come again that were recorded before."""

    def close(self, *, completed: bool) -> None:
        """Record the end of the run: whether the script closed the trackers, or the process ends before."""


class Trackers(Feature):
    """Logs to several trackers, on rank 0. Adding it is collective; it comes after ``checkpoint.resume``.

    Each tracker works in its own thread. If it fails, a message says so once, and training continues.

    Args:
        trackers: ``tensorboard``, ``wandb``, ``mlflow``, or objects with the methods of ``Tracker``.
        folder: folder of the run's results, which gives the run its name. The ids of its runs are kept in it.

    Raises:
        ConfigError: when it is added: a new run could not be started, since a library is not installed, say; on every
            rank.
        UsageError: the folder is a URL, or there is no tracker of a name.

    Example:
        >>> trackers = strategy.add(Trackers(["tensorboard", "wandb"], "runs/a"))
        >>> trackers.log({"loss": losses.value()}, strategy.global_step)
    """

    def __init__(self, trackers: Sequence[str | Tracker], folder: str | Path) -> None:
        unknown = [tracker for tracker in trackers if isinstance(tracker, str) and tracker not in LIBRARIES]
        if unknown:
            raise UsageError(
                f"there is no tracker {unknown[0]!r}: pass a list of {', '.join(LIBRARIES)} and objects of your own."
            )
        if is_url(folder):
            raise UsageError(f"{folder} is a URL, but trackers write to a folder: pass a path.")
        self._trackers, self._folder = trackers, Path(folder)
        self._workers: list[_Worker] = []

    def plug_in(self, sockets: Sockets) -> None:
        """Start the trackers, or continue the runs of a run that was resumed."""
        communicator, self._hooks = sockets.communicator, sockets.hooks
        pulse = communicator.collectives.pulse
        self._is_main = communicator.is_main
        for opened in sockets.hooks.at_folder:
            opened(self._folder)
        with pulse.within("starting the trackers"):
            communicator.on_main(lambda: self._start(max(pulse.step, 0)))
        if self._workers:
            atexit.register(self._close, completed=False)

    def _start(self, step: int) -> None:
        """Start the trackers, on rank 0. ConfigError is raised for one that a new run can't have."""
        ids: dict[str, str] = {}
        file = self._folder / _IDS
        if step:
            with suppress(OSError, ValueError):  # there are none
                ids = json.loads(file.read_text(encoding="utf-8"))
        for tracker in self._trackers:
            if not isinstance(tracker, str):
                self._workers.append(_Worker(type(tracker).__name__, tracker))
                continue
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                started = LIBRARIES[tracker](self._folder, step, ids.get(tracker))
                self._workers.append(_Worker(tracker, started))
                if started.id != ids.get(tracker):
                    ids[tracker] = started.id
                    file.write_text(json.dumps(ids), encoding="utf-8")
            except Exception as error:  # the libraries', urllib3's, the file system's
                reason = f"the tracker {tracker} could not be started: {type(error).__name__}: {error}"
                if not step:
                    self._close(completed=False)
                    raise ConfigError(f"{reason}. Install or set up what it needs, or start without it.") from error
                # A job that was restarted at night must not end for want of a server.
                print_stderr(f"unitrain: {reason}. The run is resumed without it.")

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Log the run's settings: plain data, in nested dicts. Does nothing on other ranks than 0."""
        # A copy, since the thread reads it later, when the script may have changed it.
        settings = dict(settings)
        for worker in self._workers:
            worker.calls.put(lambda tracker: tracker.log_settings(settings))

    def log(self, metrics: Mapping[str, Tensor | float], step: int) -> None:
        """Log numbers, or tensors of one element, by the optimizer step, ``strategy.global_step``.

        Does nothing on other ranks than 0. Reading a tensor from a GPU waits for it.
        """
        if not self._is_main or not (self._workers or self._hooks.logged):
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        for logged in self._hooks.logged:
            logged(numbers)
        for worker in self._workers:
            worker.calls.put(lambda tracker: tracker.log(numbers, step))

    def close(self) -> None:
        """Record that the run has ended, and wait for the trackers, up to 20 seconds. Further calls do nothing."""
        self._close(completed=True)

    def _close(self, *, completed: bool) -> None:
        workers, self._workers = self._workers, []
        # By atexit it would be called with completed=False.
        atexit.unregister(self._close)
        for worker in workers:
            worker.calls.put(lambda tracker: tracker.close(completed=completed))
            worker.calls.put(None)
        for worker in workers:
            worker.thread.join(_CLOSE_S)
            if worker.thread.is_alive():
                worker.report(f"had not recorded everything {_CLOSE_S:.0f} s after the end")


class _Worker:
    """Calls a tracker in a thread, until a call is None, and reports its first failure."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._failed = False
        self.calls: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        # A daemon: a call that hangs must not keep the process.
        self.thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                call(self._tracker)
            except Exception as error:  # whatever a library raises, training continues
                self.report(f"failed: {type(error).__name__}: {error}")

    def report(self, what: str) -> None:
        if not self._failed:
            self._failed = True
            print_stderr(f"unitrain: the tracker {self._name} {what}. What it could not record is lost there.")
