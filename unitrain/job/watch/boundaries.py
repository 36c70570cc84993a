"""``Boundaries``: the points at which this process can be stopped, and the one that the ranks have agreed on."""

from __future__ import annotations

import threading

from unitrain.job.watch.messages import BoundaryRequest
from unitrain.pulse import Pulse


class Boundaries:
    """The boundaries of this process, which its pulse counts, and the one to stop at.

    The main thread passes boundaries; the watch's thread holds them and sets where to stop.

    Args:
        pulse: counts the boundaries that have been passed.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._agreed = threading.Event()
        self._stop_at = 0
        self._request: BoundaryRequest | None = None
        self.held: bool = False
        """Whether ``due`` must be called before a boundary is passed."""

    def hold(self) -> int:
        """Hold this process at its next boundary until the ranks have agreed, and return it. From any thread."""
        self.held = True  # set first: a boundary reached in between waits, and is at most the one returned
        return self._pulse.boundary + 1

    def agree(self, boundary: int, request: BoundaryRequest) -> None:
        """Set where to stop, and the request to act on there. From any thread.

        Args:
            boundary: the number of the boundary, which no rank has passed.
            request: the action that all ranks do there.
        """
        self._stop_at, self._request = boundary, request
        self._agreed.set()  # last: the main thread reads both as soon as it is set

    def due(self) -> BoundaryRequest | None:
        """Return the request to act on at the boundary being passed, or None if it is not the one to stop at.

        Blocks until the ranks have agreed, if they are about to. In the main thread only.
        """
        self._agreed.wait()  # rank 0 answers at once, or the watch ends the process
        if self._pulse.boundary < self._stop_at:
            return None
        self.held = False
        self._agreed.clear()
        return self._request
