"""The rounds of ``local_steps``: when they end, and which weights the model has within one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unitrain import call_site
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.errors import UsageError
from unitrain.training.hooks import Hooks
from unitrain.training.loop.window import Windows
from unitrain.training.models.buffers import BufferSync
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.optimizers.local_sgd import LocalSGD


class Rounds:
    """The rounds of a run. Without ``local_steps``, there are none.

    Attributes:
        local: what averages at the end of a round; None without ``local_steps``.
    """

    def __init__(
        self,
        communicator: Communicator,
        prepared: PreparedModules,
        hooks: Hooks,
        windows: Windows,
        config: StrategyConfig,
    ) -> None:
        self.local: LocalSGD | None = None
        self._communicator = communicator
        self._prepared = prepared
        self._windows = windows
        self._buffers: BufferSync | None = None
        if config.local_steps > 1:
            self.local = LocalSGD(communicator, config)
            hooks.add_hook(self.local)
            if config.broadcast_buffers and communicator.world_size > 1:
                self._buffers = BufferSync(communicator, prepared)

    @property
    def is_open(self) -> bool:
        """Whether ranks train alone, before they average."""
        return self.local is not None and self.local.is_open

    def check_complete(self) -> None:
        """Warn at the end of a run if a round has not ended."""
        local = self.local
        if local is None or not local.steps:
            return
        local.wait()  # what is under way would fail when communication ends
        if self._communicator.is_main:
            call_site.warn(
                f"the run has ended within a round of local_steps: its last {local.at_stake} steps were not averaged "
                "over the ranks. End it after an epoch, or, without local_fragments, after the last step of a round."
            )

    def check_between(self, call: str) -> None:
        """Raise UsageError within a round."""
        local = self.local
        if local is not None and local.steps:
            raise UsageError(
                f"{call} was called after step {(local.steps - 1) % local.length + 1} of a round of {local.length} "
                "(local_steps), within which the ranks have different weights: call it after the epoch, which ends "
                "one, or, without local_fragments, after the last step of a round."
            )

    @contextmanager
    def shared_weights(self, call: str | None = None, *, buffers: bool = False) -> Iterator[None]:
        """Context manager that gives the model the weights that ranks share. Collective with ``buffers``.

        Raises UsageError for a ``call`` within a round without fragments, where they are the round's first ones.
        """
        local = self.local
        if local is None or not local.steps or local.swapped:
            yield
            return
        if local.fragments == 1 and call is not None:
            self.check_between(call)
        if buffers:
            self._share_buffers()
        local.swap()
        try:
            with self._prepared.swapped(local, local.swap):
                yield
        finally:
            local.swap()

    def average(self, *, ends: bool, not_finite: Callable[[str], None]) -> None:
        """Average what the ranks have learned, or call ``not_finite``, which says at which steps and raises."""
        local = self.local
        assert local is not None
        steps = f"within the {local.at_stake} steps up to step {self._communicator.pulse.step}"
        if not local.average(ends=ends):
            not_finite(steps)
        self._share_buffers()

    def _share_buffers(self) -> None:
        if self._buffers is not None:
            [window] = self._windows
            self._buffers.after_update(window.optimizer, window.parameters, True)
