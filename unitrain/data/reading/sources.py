"""Makes the source of a loader, which reads this rank's part of a dataset in batches."""

from __future__ import annotations

from torch.utils.data import default_collate

from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.data.order.samplers import Orders
from unitrain.data.order.sharding import EpochPlan, Plan
from unitrain.data.reading.iterable import Iterable, is_sharded
from unitrain.data.reading.map_style import MapStyle
from unitrain.data.reading.workers import with_defaults
from unitrain.data.settings import LoaderSettings
from unitrain.errors import ConfigError, DataError


def make_source(
    communicator: Communicator,
    config: StrategyConfig,
    local_world_size: int,
    given: LoaderSettings,
    plan: Plan,
) -> Iterable | MapStyle:
    """Return the source of a loader, which reads this rank's part of a dataset.

    Args:
        communicator: of this process.
        config: the settings of the run.
        local_world_size: number of processes on this host, which share its cores between their workers.
        given: the arguments of the loader.
        plan: how each epoch is divided among steps and ranks, without the sizes that only reading tells.

    Raises:
        ConfigError: an argument does not go with the kind of the dataset, or with the number of ranks.
        DataError: there would be no batches.
    """
    ranks, dataset, sharded = communicator, given.dataset, is_sharded(given)
    settings = with_defaults(
        given.passed_on, dataset, ranks.device, config,
        local_world_size=local_world_size, most_workers=1 if given.is_iterable and not sharded else 8,
    )  # fmt: skip
    # Called by the reader, which seeds the generators before, and not by the DataLoader.
    collate = settings.pop("collate_fn", default_collate)
    if given.is_iterable:
        if sharded and config.shares is not None and ranks.world_size > 1:
            raise ConfigError(
                f"a sharded {type(dataset).__name__} can't be split by shares, since it yields a part of its own on "
                "each rank: pass sharded=False if every rank can read all of it, or set strategy.shares to null."
            )
        if sharded and given.division is not None:
            raise ConfigError(
                f"a sharded {type(dataset).__name__} can't be divided by batching=, since each rank knows only its own "
                "samples: pass sharded=False if every rank can read all of it, or leave batching out."
            )
        assert isinstance(plan, EpochPlan)  # a batch sampler was refused
        return Iterable(ranks, given, plan, collate, settings)
    if given.sharded is not None or given.shards is not None:
        raise ConfigError("sharded and shards are for iterable datasets only: the loader shards map-style ones itself.")
    sampler = given.sampler if given.batch_sampler is None else given.batch_sampler
    orders = Orders(plan, lambda: given.samples, shuffle=given.shuffle, sampler=sampler)
    source = MapStyle(dataset, orders, collate, seeded=given.sample_seeding, settings=settings)
    planned = source.plan(config.seed, 0)
    # At once, and not when a script has trained for nothing: an epoch of no steps raises no other error.
    if not planned.steps:
        raise DataError(
            f"the loader has no batches: {planned.samples} samples, a global batch size of {planned.global_batch}, "
            f"drop_last={given.drop_last}. Use more data or a smaller batch size."
        )
    return source
