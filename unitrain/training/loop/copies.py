"""Detects ranks that train on the same samples, because the script does not shard its data."""

from __future__ import annotations

from torch import Tensor

from unitrain import call_site
from unitrain.communication.communicator import Communicator

_CHECKS = 3


class CopyCheck:
    """Compares the ranks' first losses, and warns if they are equal bit for bit: N copies of one job.

    Args:
        communicator: the communicator of this process.

    Attributes:
        pending: whether further losses need to be compared.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._checks_left = _CHECKS
        self.pending: bool = True

    def compare(self, loss: Tensor) -> None:
        """Compare one loss. Collective."""
        losses = self._communicator.all_gather(loss.detach().double())
        equal = bool((losses == losses[0]).all())
        self._checks_left -= 1
        self.pending = equal and self._checks_left > 0
        if equal and not self.pending and self._communicator.is_main:
            call_site.warn(
                f"the first {_CHECKS} losses are equal on all {self._communicator.world_size} ranks, which seem to "
                "train on the same samples, at no gain in speed. Use strategy.dataloader, which shards the dataset."
            )
