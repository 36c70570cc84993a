"""``Synchronisation``: replaces BatchNorm layers in ``prepare``, and puts them back in exports."""

from __future__ import annotations

from torch import nn

from unitrain.features.sync_batchnorm.layers import revert, synchronise
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets
from unitrain.training.models.passes import ModulePass


class Synchronisation(Feature, ModulePass):
    """Lets BatchNorm layers compute their statistics over the global batch.

    Args:
        only_torchs: synchronise torch's own ``SyncBatchNorm`` layers only, which the script has put there.
    """

    place = 10
    _sockets: Sockets

    def __init__(self, *, only_torchs: bool) -> None:
        self._only_torchs = only_torchs
        self.communicates: bool = not only_torchs

    def plug_in(self, sockets: Sockets) -> None:
        """Plug this into a run."""
        self._sockets = sockets
        super().plug_in(sockets)

    def apply(self, module: nn.Module) -> None:
        """Synchronise the layers of a module, whose names in calls are those without a compiler's wrapper."""
        synchronise(
            self._sockets.prepared.unwrap(module),
            self._sockets.communicator,
            self._sockets.batches.current_batch,
            only_torchs=self._only_torchs,
        )

    def revert(self, copy: nn.Module) -> None:
        """Make the layers of a copy those that they were, with the statistics of now."""
        revert(copy)
