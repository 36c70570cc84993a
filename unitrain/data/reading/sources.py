"""Makes what a loader reads from: the part of a dataset that is this rank's, in batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import default_collate

from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.data.order.samplers import BatchSamplerOrder, Orders, OwnOrder, SamplerOrder
from unitrain.data.order.sharding import BatchPlan, EpochPlan
from unitrain.data.reading.iterable import Iterable
from unitrain.data.reading.map_style import MapStyle
from unitrain.data.reading.workers import with_defaults
from unitrain.data.settings import LoaderSettings
from unitrain.errors import DataError

# Of a sampler without a length, for one epoch: more than that take seconds to draw.
_MOST_INDICES = 2**23


class Sources:
    """Makes the sources of a loader.

    Args:
        communicator: the communicator of this process.
        config: the strategy's settings.
        local_world_size: number of processes on this host.
        sample_seeding: seed random number generators for each sample of a map-style dataset.
    """

    def __init__(
        self, communicator: Communicator, config: StrategyConfig, local_world_size: int, *, sample_seeding: bool
    ) -> None:
        self._communicator = communicator
        self._config = config
        self._local_world_size = local_world_size
        self._sample_seeding = sample_seeding

    def iterable(self, given: LoaderSettings, shares: tuple[int, ...], *, sharded: bool) -> Iterable:
        """Return a source that reads an iterable dataset.

        Args:
            given: the loader's settings.
            shares: of all ranks.
            sharded: whether the dataset yields a different part on each rank and worker.
        """
        settings = self._with_defaults(given, most_workers=8 if sharded else 1)
        collate = settings.pop("collate_fn", default_collate)
        plan = self._epoch_plan(given, shares, 0)
        return Iterable(self._communicator, given.dataset, plan, collate, sharded=sharded, settings=settings)

    def map_style(self, given: LoaderSettings, shares: tuple[int, ...], seed: int) -> MapStyle:
        """Return a source that reads a map-style dataset.

        Args:
            given: the loader's settings.
            shares: of all ranks.
            seed: of the order.

        Raises:
            DataError: it would have no batches.
        """
        ranks = self._communicator
        orders: Orders
        most = max(_MOST_INDICES, 16 * len(given.dataset))
        if given.batch_sampler is not None:
            plan = BatchPlan((), self._config.accumulate, ranks.rank, ranks.world_size, shares=shares)
            orders = BatchSamplerOrder(plan, given.batch_sampler, most)
        elif given.sampler is not None:
            orders = SamplerOrder(self._epoch_plan(given, shares, 0), given.sampler, most)
        else:
            orders = OwnOrder(self._epoch_plan(given, shares, len(given.dataset)), given.shuffle)
        settings = self._with_defaults(given, most_workers=8)
        collate = settings.pop("collate_fn", default_collate)
        source = MapStyle(given.dataset, orders, collate, seeded=self._sample_seeding, settings=settings)
        planned = source.plan(seed, 0)
        if planned.steps == 0 and given.batch_sampler is not None:
            raise DataError("the loader has no batches: its batch sampler yields none.")
        if planned.steps == 0:
            size = self._epoch_plan(given, shares, 0).global_batch
            raise DataError(
                f"the loader has no batches: {planned.samples} samples, a global batch size of {size}, "
                f"drop_last={given.drop_last}. Use more data or a smaller batch size."
            )
        return source

    def _with_defaults(self, given: LoaderSettings, most_workers: int) -> dict[str, Any]:
        return with_defaults(
            given.passed_on,
            given.dataset,
            self._communicator.device,
            self._config,
            local_world_size=self._local_world_size,
            most_workers=most_workers,
        )

    def _epoch_plan(self, given: LoaderSettings, shares: tuple[int, ...], samples: int) -> EpochPlan:
        ranks = self._communicator
        accumulate = given.micro_batches(shares, self._config.accumulate)
        per_step = given.samples_per_step(ranks.world_size, accumulate)
        return EpochPlan(samples, per_step, accumulate, ranks.rank, ranks.world_size, given.drop_last, shares=shares)
