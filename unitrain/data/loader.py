"""A strategy's loader: each process's share of a dataset, each sample exactly once, at the right weight."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Sampler, default_collate

from unitrain.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.data.feeding import feed
from unitrain.data.fingerprint import check_same_data, fingerprint
from unitrain.data.iterable import Iterable, is_sharded
from unitrain.data.loop import Iteration, LoopListener
from unitrain.data.map_style import MapStyle
from unitrain.data.samplers import BatchSamplerOrder, Orders, OwnOrder, SamplerOrder
from unitrain.data.settings import LoaderSettings
from unitrain.data.sharding import BatchPlan, EpochPlan
from unitrain.data.workers import with_defaults
from unitrain.errors import CheckpointError, ConfigError, DataError, UsageError
from unitrain.job.handshake import difference


class Loader:
    """Iterates over this rank's share of a dataset. Made by ``strategy.dataloader``.

    Every rank gets the same number of batches, already on its device. Where a global batch has fewer samples than
    there are ranks, the others get an empty batch: the same structure with tensors of 0 rows, which weighs nothing in
    ``strategy.step`` and the meters.

    An iteration that comes to its end is an epoch. One that is broken off counts as an epoch as well once one of its
    batches has gone into a backward of the strategy: the next iteration begins the next epoch. One that is broken off
    before that, ``next(iter(loader))`` say, does not count: the next iteration yields the same batches again.

    Args:
        communicator: of this process; the ranks share the data.
        listener: the training loop.
        config: the strategy's settings.
        local_world_size: number of processes on this host.
        dataset: map-style (``__getitem__`` and ``__len__``), iterable (``__iter__``), or a torch ``DataLoader`` to be
            converted.
        global_batch_size: samples of one optimizer step over all processes and micro-batches; results then do not
            depend on the number of processes.
        batch_size: PyTorch's: samples of one batch of one process. Give exactly one of the two.
        shuffle: a new order each epoch, which depends on the strategy's seed and the epoch alone.
        sampler: yields the indices of an epoch, in place of ``shuffle``; every rank draws the same ones.
        batch_sampler: yields lists of indices, in place of a batch size and an order. Each is the global batch of one
            optimizer step, of which every rank gets its share.
        drop_last: leave out the samples that do not fill a last step.
        sample_seeding: let each sample draw python's, numpy's and torch's random numbers from (seed, epoch, sample),
            so that it looks the same wherever and whenever it is read. For map-style data.
        sharded: whether an iterable dataset yields a part of its own on each rank and worker. Otherwise every rank
            reads all of it and keeps its share. Default: as Hugging Face's and WebDataset's do, and those with a
            method ``shard(num_shards, index)``, which is called.
        **settings: ``DataLoader``'s, with torch's meaning: collate_fn, num_workers, persistent_workers, pin_memory,
            prefetch_factor, timeout, worker_init_fn, multiprocessing_context. By default, there are workers only on
            a GPU (one for each core of this process but one, at most 8, and none for data in memory), and they have
            half of ``timeout_s`` for a batch.

    Attributes:
        dataset: what was given.
        epoch: the epoch that the next iteration yields, or the one under way.
        global_batch_size: samples of one optimizer step over all processes; None with a batch sampler.

    Raises:
        ConfigError: settings that contradict each other or torch does not know.
        DataError: a dataset that can't be sharded.
    """

    def __init__(
        self,
        communicator: Communicator,
        listener: LoopListener,
        config: StrategyConfig,
        local_world_size: int,
        dataset: Any,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        sampler: Sampler[int] | Sequence[int] | None = None,
        batch_sampler: Sampler[list[int]] | Sequence[Sequence[int]] | None = None,
        drop_last: bool = False,
        sample_seeding: bool = True,
        sharded: bool | None = None,
        **settings: Any,
    ) -> None:
        given = LoaderSettings(
            dataset, global_batch_size, batch_size, shuffle, sampler, batch_sampler, drop_last, settings
        )
        self.dataset: Any = given.dataset
        self.global_batch_size: int | None = None
        self._communicator = communicator
        self._listener = listener
        self._config = config
        self._local_world_size = local_world_size
        self._seed = config.seed
        self._compared = False
        self.epoch = 0
        self._source: Iterable | MapStyle
        self._reads_shards = given.is_iterable and (is_sharded(self.dataset) if sharded is None else sharded)
        if given.is_iterable:
            self._source = self._iterable(given, self._reads_shards)
        elif sharded is not None:
            raise ConfigError("sharded is for iterable datasets; the samples of a map-style one are dealt out.")
        else:
            self._source = self._map_style(given, sample_seeding)

    def _iterable(self, given: LoaderSettings, sharded: bool) -> Iterable:
        settings = self._with_defaults(given, most_workers=8 if sharded else 1)
        collate = settings.pop("collate_fn", default_collate)
        return Iterable(
            self._communicator, self.dataset, self._epoch_plan(given, 0), collate, sharded=sharded, settings=settings
        )

    def _map_style(self, given: LoaderSettings, seeded: bool) -> MapStyle:
        ranks = self._communicator
        orders: Orders
        if given.batch_sampler is not None:
            plan = BatchPlan((), self._config.accumulate, ranks.rank, ranks.world_size)
            orders = BatchSamplerOrder(plan, given.batch_sampler)
        elif given.sampler is not None:
            orders = SamplerOrder(self._epoch_plan(given, 0), given.sampler)
        else:
            orders = OwnOrder(self._epoch_plan(given, len(self.dataset)), given.shuffle)
        settings = self._with_defaults(given, most_workers=8)
        collate = settings.pop("collate_fn", default_collate)
        source = MapStyle(self.dataset, orders, collate, seeded=seeded, settings=settings)
        planned = source.plan(self._seed, 0)
        if planned.steps == 0:
            raise DataError(
                f"no batch can be made: {planned.samples} samples, a global batch of {self.global_batch_size}, "
                f"drop_last={given.drop_last}. Give more data or a smaller batch."
            )
        return source

    def _with_defaults(self, given: LoaderSettings, most_workers: int) -> dict[str, Any]:
        return with_defaults(
            given.passed_on,
            self.dataset,
            self._communicator.device,
            self._config,
            local_world_size=self._local_world_size,
            most_workers=most_workers,
        )

    def _epoch_plan(self, given: LoaderSettings, samples: int) -> EpochPlan:
        ranks, accumulate = self._communicator, self._config.accumulate
        self.global_batch_size = given.samples_per_step(ranks.world_size, accumulate)
        return EpochPlan(samples, self.global_batch_size, accumulate, ranks.rank, ranks.world_size, given.drop_last)

    def __len__(self) -> int:
        """Return the number of batches (micro-batches) in a whole epoch, the same on every rank.

        Raises:
            TypeError: an iterable dataset does not tell, as with a torch DataLoader.
        """
        return self._source.plan(self._seed, self.epoch).micro_batches

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch; TypeError where ``len()`` is one."""
        return self._source.plan(self._seed, self.epoch).steps

    @property
    def samples(self) -> int | None:
        """Samples of a whole epoch, over all ranks; None where an iterable dataset does not tell."""
        try:
            return self._source.plan(self._seed, self.epoch).end
        except TypeError:
            return None

    @property
    def yielded(self) -> int:
        """Samples of the epoch under way that were yielded, over all ranks, those of an open window included."""
        return self._yielded

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration yields, or the one under way. Set it to begin another."""
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch = number
        self._begin_at(0, 0)

    def _begin_at(self, consumed: int, steps: int) -> None:
        """Let the next iteration begin after so many samples and steps of the epoch."""
        self._iteration: Iteration | None = None
        self._start = (consumed, steps)
        self._consumed, self._steps = self._start
        self._yielded = consumed

    @property
    def _under_way(self) -> bool:
        """Whether an iteration that counts as an epoch has been broken off, or is under way."""
        return self._iteration is not None and self._iteration.trained

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of ``total``, and see to it that each is iterated as such.

        The first continues where ``load_state_dict`` says, or follows the one whose iteration was broken off.
        """
        for number in range(self.epoch + self._under_way, total):
            if self._under_way or number != self.epoch:
                self.epoch = number
            yield number

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of an epoch, on the device: the rest of one that was loaded, else the next."""
        if self._under_way:
            self.epoch += 1
        elif self._iteration is not None:  # broken off before anything was trained on: it did not count
            self._begin_at(*self._start)
        if not self._compared and self._communicator.world_size > 1 and not self._reads_shards:
            self._check_ranks_alike()
        self._compared = True
        iteration = self._iteration = Iteration()
        try:
            yield from self._batches(iteration)
        finally:
            if iteration is self._iteration and not iteration.trained:
                self._begin_at(*self._start)
        if self._listener.is_training():
            self._listener.yields(None, iteration)
        self.epoch += 1

    def _batches(self, iteration: Iteration) -> Iterator[Any]:
        listener = self._listener
        batches = self._source.batches(self._seed, self.epoch, *self._start)
        for micro_batch, batch in listener.observed(feed(batches, self._communicator.device)):
            # Asked anew for each batch: an evaluation may begin and end within a training epoch.
            if not listener.is_training():
                listener.boundary()
            else:
                if micro_batch.first:
                    listener.boundary()  # all that was yielded has been trained on
                listener.yields(micro_batch, iteration)
            # Within an accumulation window nothing is consumed yet: its gradients are in no checkpoint.
            if micro_batch.last:
                self._consumed, self._steps = micro_batch.stop, micro_batch.step + 1
            self._yielded = micro_batch.stop
            yield batch
            if iteration is not self._iteration:
                raise UsageError("this loader is iterated anew elsewhere: it yields one epoch at a time.")

    def _check_ranks_alike(self) -> None:
        """Raise, on all ranks, where they are about to share out different data. Collective."""
        own = self.state_dict()
        facts = {
            "its length": own["length"],
            "its content": own["fingerprint"],
            "its global batch size": own["global_batch_size"],
        }
        found = difference(self._communicator.all_gather_object(facts))
        if found is not None:
            raise DataError(
                f"the ranks gave a loader different data: {found[0]} is {found[1]}. Give every rank the whole dataset: "
                "the loader divides it. (An iterable dataset that yields each rank's part takes sharded=True.)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands in its data, in ints and strings that are equal on all ranks. Not collective.

        A batch is consumed when it has been yielded; one that was only prefetched is not, nor is one of an iteration
        that was broken off before anything was trained on. The batches of an accumulation window are consumed
        together, with its last: a state from within a window is that of its start.
        """
        return {
            "seed": self._seed,
            "epoch": self.epoch,
            "consumed": self._consumed,
            "steps": self._steps,
            "length": len(self.dataset) if hasattr(self.dataset, "__len__") else None,
            "fingerprint": fingerprint(self.dataset),
            "global_batch_size": self.global_batch_size,
            "readers": self._source.readers(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue where ``state`` was taken, on any number of ranks and any backend.

        Samples that were consumed are not read; those of an iterable dataset are, and dropped. Order and random
        numbers follow from the state's seed from now on, with a warning where the strategy's is another. With another
        global batch size the rest of the epoch is cut anew, with a warning: each sample still comes once, but the
        batches are not those of an uninterrupted run. A sharded iterable dataset continues within an epoch only on as
        many ranks and workers as before.

        Raises:
            CheckpointError: this is no loader's state, or that of other data or of a stream that was read otherwise.
        """
        own = self.state_dict()
        missing = own.keys() - state.keys()
        if missing:
            raise CheckpointError(f"this is no loader's state: it lacks {', '.join(sorted(missing))}.")
        check_same_data(state, own)
        if state["consumed"]:
            self._check_position(state, own)
        if state["seed"] != self._config.seed:
            self._warn(
                f"the data keep their order, by the saved run's seed {state['seed']}, though this run's seed is "
                f"{self._config.seed}."
            )
        if state["global_batch_size"] != self.global_batch_size:
            self._warn(
                f"the global batch size was {state['global_batch_size']} and is {self.global_batch_size}: epoch "
                f"{state['epoch']} continues after {state['consumed']} samples in batches of the new size."
            )
        self._seed, self.epoch = state["seed"], state["epoch"]
        self._begin_at(state["consumed"], state["steps"])

    def _check_position(self, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Raise where an epoch can't continue within."""
        if state["readers"] != own["readers"]:
            raise CheckpointError(
                f"a sharded stream can't continue within epoch {state['epoch']}: its ranks, workers of each and "
                f"samples of a batch were {state['readers']} and are {own['readers']}. Continue as before, or begin an "
                "epoch: set loader.epoch."
            )
        if isinstance(self._source, MapStyle) and not self._source.plan(state["seed"], state["epoch"]).can_start_at(
            state["consumed"]
        ):
            raise CheckpointError(
                f"epoch {state['epoch']} can't continue after {state['consumed']} samples: its sampler yields other "
                "batches, or fewer samples, than when the state was taken."
            )

    def _warn(self, message: str) -> None:
        if self._communicator.is_main:
            warnings.warn(message, UserWarning, stacklevel=3)
