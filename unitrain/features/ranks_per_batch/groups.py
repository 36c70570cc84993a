"""``SharedBatches``: divides the ranks into groups, seeds them alike, and compares their batches."""

from __future__ import annotations

import torch

from unitrain.data.loop import Batches
from unitrain.data.reading.fingerprint import sample_digest
from unitrain.errors import ConfigError, DataError
from unitrain.rng import seed_rank
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets

_COMPARED = 3


class SharedBatches(Feature):
    """Has ranks that follow each other read the same batches, and draw the same random numbers in the loop over them.

    A forward on parts of different sizes leaves the generators in different states. So they are seeded for each batch
    of a loader, by its place in the run. The first batches are compared within the groups.

    Args:
        size: number of ranks in a group.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._to_compare = _COMPARED

    def plug_in(self, sockets: Sockets) -> None:
        """Divide the ranks.

        Raises:
            ConfigError: their number is not a multiple of a group's.
        """
        ranks, size = sockets.communicator, self._size
        if ranks.world_size % size:
            raise ConfigError(
                f"ranks_per_batch is {size}, but this job has {ranks.world_size} ranks: start a multiple of {size}."
            )
        groups = [range(first, first + size) for first in range(0, ranks.world_size, size)]
        sockets.share_batches(groups)
        self._sockets = sockets
        super().plug_in(sockets)

    def batches(self, batches: Batches) -> Batches:
        """Yield batches. Compare the first ones, and seed the generators for each."""
        for micro_batch, batch in batches:
            if self._to_compare:
                self._to_compare -= 1
                self._compare(batch)
            self._seed(micro_batch.start)
            yield micro_batch, batch

    def at_evaluation(self) -> None:
        """Seed the generators."""
        self._seed(0)

    def _seed(self, position: int) -> None:
        """Seed the generators by the number of the step, a position in the epoch, and the group."""
        step = self._sockets.communicator.collectives.pulse.step
        seed_rank(self._sockets.config.seed, step, position, self._sockets.readers.rank)

    def _compare(self, batch: object) -> None:
        """Check that the ranks of each group have the same batch. Collective.

        Raises:
            DataError: they have not; on every rank.
        """
        digests = self._sockets.communicator.all_gather(torch.tensor(sample_digest(batch))).tolist()
        for rank, digest in enumerate(digests):
            first = rank - rank % self._size
            if digest != digests[first]:
                raise DataError(
                    f"rank {rank} got another batch than rank {first}, but they share batches: the dataset "
                    "and the collate function must return the same on both, whatever their rank. From python's, "
                    "numpy's and torch's global generators, both draw the same."
                )
