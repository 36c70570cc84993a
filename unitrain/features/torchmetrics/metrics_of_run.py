"""``MetricsOfRun``: the metrics of a run in its checkpoints, and a check that they are synchronised."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from unitrain.errors import UsageError
from unitrain.features.torchmetrics.states import MetricStates
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets


class MetricsOfRun(Feature):
    """Has checkpoints save the metrics among their modules, and refuses metrics that were not synchronised.

    On several ranks, torchmetrics would synchronise them if the backend happens to use torch.distributed, and wait for
    ranks that don't compute. Otherwise each rank would silently compute its own value.
    """

    def __init__(self) -> None:
        self._undo: Callable[[], None] | None = None

    def plug_in(self, sockets: Sockets) -> None:
        """Add the part to the checkpoints of the run, and begin to check."""
        sockets.parts.append(lambda objects: MetricStates.of(sockets.readers, objects))
        if sockets.communicator.world_size > 1:
            sockets.hooks.add_hook(self)
            self.at_evaluation()

    def at_evaluation(self) -> None:
        """Begin to check, if torchmetrics has been imported by now."""
        library = sys.modules.get("torchmetrics.metric")
        base = getattr(library, "Metric", None)
        if self._undo is not None or base is None:
            return
        default, sync = getattr(library, "jit_distributed_available", None), base.sync

        @functools.wraps(sync)
        def checked(metric: Any, *args: Any, should_sync: bool = True, **chosen: Any) -> None:
            # With arguments, or another function, the script synchronises the metric by itself.
            unknown = metric.distributed_available_fn is default and not args and not any(chosen.values())
            if should_sync and unknown:
                raise UsageError(
                    f"{type(metric).__name__} was not passed to synchronise_metric(), so that its value would be of "
                    "one rank or of all, by backend. Pass it once it is made: metric = synchronise_metric(metric, "
                    "strategy), from unitrain.features.torchmetrics. For the value of this rank's data, such as "
                    "gathered rows, make it with sync_on_compute=False."
                )
            sync(metric, *args, should_sync=should_sync, **chosen)

        base.sync = checked
        self._undo = partial(setattr, base, "sync", sync)

    def at_close(self) -> None:
        """End the check."""
        if self._undo is not None:
            self._undo()
            self._undo = None
