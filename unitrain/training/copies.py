"""Whether the ranks train on the same samples, as they do where a script shares nothing out."""

from __future__ import annotations

import warnings

from torch import Tensor

from unitrain.communicator import Communicator

_LOOKS = 3


class CopyCheck:
    """Compares the ranks' first losses, and warns where they are the same to the bit: N copies of one job.

    Args:
        ranks: who has losses.

    Attributes:
        pending: whether there is still something to compare.
    """

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks
        self._looks_left = _LOOKS
        self.pending: bool = True

    def look(self, loss: Tensor) -> None:
        """Compare one loss. Collective."""
        losses = self._ranks.all_gather(loss.detach().double())
        alike = bool((losses == losses[0]).all())
        self._looks_left -= 1
        self.pending = alike and self._looks_left > 0
        if alike and not self.pending and self._ranks.rank == 0:
            warnings.warn(
                f"the first {_LOOKS} losses are the same on all {self._ranks.world_size} ranks, to the bit: each seems "
                "to train on the same samples, which gains nothing. Let strategy.dataloader share them out.",
                UserWarning,
                stacklevel=6,
            )
