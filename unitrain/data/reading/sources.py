"""Makes the source of a loader, which reads this rank's part of a dataset in batches."""

from __future__ import annotations

from dataclasses import replace

from torch.utils.data import default_collate

from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.data.order.samplers import Orders, Plan
from unitrain.data.order.sharding import BatchPlan, EpochPlan
from unitrain.data.reading.iterable import Iterable, is_sharded
from unitrain.data.reading.map_style import MapStyle
from unitrain.data.reading.workers import with_defaults
from unitrain.data.settings import LoaderSettings
from unitrain.errors import ConfigError, DataError

# Of a sampler without a length, for one epoch: more than that take seconds to draw.
_MOST_INDICES = 2**23


def make_source(
    communicator: Communicator,
    config: StrategyConfig,
    local_world_size: int,
    given: LoaderSettings,
    shares: tuple[int, ...],
    seed: int,
) -> Iterable | MapStyle:
    """Return the source of a loader, which reads this rank's part of a dataset.

    Args:
        communicator: of this process.
        config: the settings of the run.
        local_world_size: number of processes on this host, which share its cores between their workers.
        given: the arguments of the loader.
        shares: each rank's share of the samples, in lowest terms.
        seed: of the run.

    Raises:
        ConfigError: an argument does not go with the kind of the dataset, or with the number of ranks.
        DataError: there would be no batches.
    """
    ranks, dataset = communicator, given.dataset
    sharded = given.is_iterable and (is_sharded(dataset) if given.sharded is None else given.sharded)
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
        plan = _epoch_plan(given, ranks, config, shares, 0)
        return Iterable(ranks, dataset, plan, collate, sharded=sharded, shards=given.shards, settings=settings)
    if given.sharded is not None:
        raise ConfigError("sharded is for iterable datasets only: the loader always shards map-style datasets.")
    if given.shards is not None:
        raise ConfigError("shards is for sharded iterable datasets only: others are the same on any number of ranks.")
    orders = _orders(given, ranks, config, shares)
    source = MapStyle(dataset, orders, collate, seeded=given.sample_seeding, settings=settings)
    _check_batches(source.plan(seed, 0), given)
    return source


def _orders(given: LoaderSettings, ranks: Communicator, config: StrategyConfig, shares: tuple[int, ...]) -> Orders:
    """Return the epochs of a map-style dataset."""
    samples = len(given.dataset)
    plan: Plan
    if given.batch_sampler is not None:
        plan = BatchPlan((), config.accumulate, ranks.rank, ranks.world_size, shares=shares, division=given.division)
    else:
        plan = _epoch_plan(given, ranks, config, shares, samples)
    sampler = given.sampler if given.batch_sampler is None else given.batch_sampler
    most = max(_MOST_INDICES, 16 * samples)
    return Orders(plan, shuffle=given.shuffle, sampler=sampler, most=most)


def _epoch_plan(
    given: LoaderSettings, ranks: Communicator, config: StrategyConfig, shares: tuple[int, ...], samples: int
) -> EpochPlan:
    """Return the plan of an epoch with batches of one size. The number of samples may not be known yet."""
    accumulate = given.micro_batches(shares, config.accumulate)
    per_step = given.samples_per_step(ranks.world_size, accumulate)
    plan = EpochPlan(samples, per_step, accumulate, ranks.rank, ranks.world_size, given.drop_last, shares=shares)
    return replace(plan, division=given.division)


def _check_batches(planned: EpochPlan | BatchPlan, given: LoaderSettings) -> None:
    # At once, and not when a script has trained for nothing: an epoch of no steps raises no other error.
    if planned.steps:
        return
    if isinstance(planned, BatchPlan):
        raise DataError("the loader has no batches: its batch sampler yields none.")
    raise DataError(
        f"the loader has no batches: {planned.samples} samples, a global batch size of {planned.global_batch}, "
        f"drop_last={given.drop_last}. Use more data or a smaller batch size."
    )
