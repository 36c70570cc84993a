"""``Loader``: yields each process's part of a dataset, each sample exactly once per epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from unitrain import call_site
from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import are_identical, difference_between_ranks
from unitrain.config import StrategyConfig
from unitrain.data.loop import Iteration, LoopListener
from unitrain.data.options import LoaderOptions
from unitrain.data.order.sharding import MicroBatch
from unitrain.data.order.shares import part_of
from unitrain.data.reading.feeding import feed
from unitrain.data.reading.fingerprint import check_same_data, fingerprint, is_declared
from unitrain.data.reading.iterable import Iterable
from unitrain.data.reading.map_style import COMPARED, MapStyle
from unitrain.data.reading.sources import make_source
from unitrain.data.settings import LoaderSettings
from unitrain.errors import CheckpointError, DataError, UsageError

_WHOLE = (
    "Pass the whole dataset on every rank: the loader shards it. In the same order: sort os.listdir() and what comes "
    "from a set, and seed shuffles, splits and data that are generated (from prepare() on, each rank draws others)."
)


class Loader:
    """Iterates over this rank's part of a dataset. Made by ``strategy.dataloader``.

    In training, every rank gets the same number of batches, already on its device. If a global batch has fewer samples
    than there are ranks, a rank without samples gets a stand-in: a batch of one sample of another rank, which has
    weight 0 in ``strategy.step``, in BatchNorm, in meters and in metrics. ``stand_in`` tells. In an evaluation, and
    while no prepared model is in training mode, it gets no batch, so that each sample is yielded exactly once. If a
    prepared model's parameters are sharded (fsdp), it always gets a stand-in, since every forward is collective.

    A complete iteration is an epoch. An iteration that ends early counts as an epoch, too, if one of its batches was
    used in a backward of the strategy, or an optimizer has stepped in it: the next iteration starts the next epoch.
    Otherwise, after ``next(iter(loader))`` say, it does not count: the next iteration yields the same batches again.

    Attributes:
        dataset: the dataset.
        epoch: the epoch of the next iteration, or of the current one.
        global_batch_size: number of samples per optimizer step over all processes; None with a batch sampler.
        identity: an object that stands for the loader in its iterations.

    Raises:
        ConfigError: arguments are unknown or contradict each other.
        DataError: the dataset can't be sharded.
    """

    def __init__(
        self,
        communicator: Communicator,
        loop: LoopListener,
        config: StrategyConfig,
        local_world_size: int,
        dataset: Any,
        **options: Unpack[LoaderOptions],
    ) -> None:
        # Refused here, before any rank reads data: a mistake is then the same on all of them.
        given = LoaderSettings.of(dataset, options)
        self.dataset: Any = given.dataset
        readers = loop.readers
        plan = given.plan(readers.rank, readers.world_size, loop.shares, config.accumulate)
        self.global_batch_size: int | None = plan.global_batch
        self._communicator = communicator
        self._loop = loop
        self._config = config
        self._seed = config.seed
        # Number of samples when the ranks compared their data, which they do again if it has changed; None before.
        self._compared: int | None = None
        self.identity: object = object()  # an iteration that outlives the loader must not keep its dataset in memory
        self._iteration: Iteration | None = None
        self._latest: Iteration | None = None  # also when it has ended
        self._resumed = False  # in a later epoch, and not iterated over since
        self._given = given
        self._made_at = call_site.current()
        self._trial = communicator.collectives.pulse.trial
        self.epoch = 0
        self._source: Iterable | MapStyle = make_source(readers, config, local_world_size, given, plan)

    def __len__(self) -> int:
        """Return the number of batches (micro-batches) in an epoch, the same on every rank.

        Raises:
            TypeError: the length of an iterable dataset is unknown, as with a torch DataLoader.
        """
        return self._source.plan(self._seed, self._epoch).micro_batches

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in an epoch. Raises TypeError if ``len()`` does."""
        return self._source.plan(self._seed, self._epoch).steps

    @property
    def samples(self) -> int | None:
        """Number of samples in an epoch, over all ranks; None if the length of an iterable dataset is unknown."""
        try:
            return self._source.plan(self._seed, self._epoch).end
        except TypeError:
            return None

    @property
    def yielded(self) -> int:
        """Number of samples yielded in the current epoch, over all ranks, including the samples of an open window."""
        last = self._last
        return self._start[0] if last is None else last.stop

    @property
    def stand_in(self) -> bool:
        """Whether the batch that was yielded last is the stand-in of a rank without samples, to be left out of counts.

        Example:
            >>> for images, labels in train:
            ...     seen += 0 if train.stand_in else len(labels)
        """
        last = self._last
        return last is not None and not last.count

    def sample_positions(self) -> Tensor:
        """Return the positions in the epoch's order of the samples in the last batch; after a loop, in all its batches.

        Without ``shuffle`` and samplers, that is their order in the dataset. The sample of a stand-in has -1.

        Raises:
            UsageError: nothing was yielded yet, or the positions are not known, since ranks read different shards.
        """
        iteration = self._latest
        if iteration is None:
            raise UsageError("the loader of in_order= was not iterated over: pass the loader that the rows are from.")
        depends = isinstance(self._source, Iterable) and self._given.division is not None  # on samples
        if iteration.order is None or (iteration.is_over and depends):
            raise UsageError(
                f"the order of a {type(self.dataset).__name__} over the ranks is not known, in shards, or after a loop "
                "with batching=: let it yield an index with each sample, gather that as well, and sort by it."
            )
        last, part = iteration.micro_batch, part_of(self._loop.readers.rank, self._loop.shares)
        if last is None:  # resumed at the end of an epoch
            return torch.empty(0, dtype=torch.int64)
        read = self._source.read(last.stop) if iteration.is_over else [last]
        positions = [batch.positions(part) if batch.count else np.array([-1]) for batch in read]
        return torch.from_numpy(np.concatenate(positions))

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, or of the current one. Set it to start another."""
        self._loop.epoch_asked = True  # who reads the number asks for it, as range(loader.epoch, total) does
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch, self._resumed = number, False
        self._begin_at(0, 0)

    def _begin_at(self, consumed: int, steps: int) -> None:
        """Start the next iteration after this many samples (over all ranks) and steps of the epoch."""
        self._iteration = None
        self._start = (consumed, steps)
        if not consumed:
            self._given.held = None

    @property
    def _last(self) -> MicroBatch | None:
        """The micro-batch that was yielded last in the current iteration."""
        return None if self._iteration is None else self._iteration.micro_batch

    @property
    def _counts(self) -> bool:
        """Whether there is an unfinished iteration that counts as an epoch."""
        return self._iteration is not None and self._loop.leave(self._iteration)

    def set_epoch(self, epoch: int) -> NoReturn:
        """Raise UsageError: unlike a ``DistributedSampler``, a loader shuffles anew in each epoch by itself."""
        raise UsageError(
            "loader.set_epoch() is not needed: a loader shuffles anew in each epoch. Remove the call; to begin with "
            "another epoch, set loader.epoch."
        )

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the remaining epochs of ``total``, and set ``epoch`` for each.

        The first continues from the loaded state, or follows an epoch that was left early.

        Args:
            total: number of epochs of the whole run, including those before it was resumed.
        """
        self._loop.epoch_asked = True
        # An unfinished iteration that counts is an epoch of its number: the script left it on purpose.
        for number in range(self._epoch + self._counts, total):
            if self._counts or number != self._epoch:
                self.epoch = number
            yield number
            self._loop.follows()  # the evaluation, say, that a script runs after an epoch: the run may stop here

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of an epoch, on its device, after those that were consumed before resuming.

        The first iteration, and each after the dataset's length has changed, compares the data of the ranks, so it is
        collective, as is the end of one of a stream. In between, a rank waits for others only for a sharded stream.

        Raises:
            DataError: the ranks have different data or orders, or a worker died or hangs.
            UsageError: another iteration over this loader was started in the meantime.
            Stopped: the run is stopped at this boundary.
        """
        resumed, self._resumed = self._resumed, False
        # A script that counts the epochs of one loader may go round others.
        if resumed and not self._loop.epoch_asked:
            self._communicator.warn(
                f"this run was resumed in epoch {self._epoch}, but the script has not asked for its number: with "
                "range(), it would train the epochs before again. Write `for epoch in loader.epochs(total)`."
            )
        if self._counts:
            self.epoch = self._epoch + 1
        elif self._iteration is not None:
            self._begin_at(*self._start)
        if self._loop.is_training() and self._communicator.collectives.pulse.trial != self._trial:
            raise UsageError(
                f"the loader that was made at {self._made_at} belongs to another trial, or to none: its order "
                "would depend on what was trained before. Make a loader in each trial; one may evaluate for all."
            )
        shares_order = self._source.readers(self._epoch) is None  # with all ranks
        if isinstance(self._source, MapStyle) and self._given.held is None:
            self._given.held = len(self.dataset)
        length = self._given.held or 0
        comparing = self._compared != length and self._communicator.world_size > 1 and shares_order
        if self._compared is None and isinstance(self._source, MapStyle) and not self._start[0]:
            self._source.forget()
        if comparing:
            self._check_same_data()
        self._compared = length
        iteration = self._iteration = self._latest = Iteration(
            self.identity, (self._seed, self._epoch) if shares_order else None
        )
        complete = False
        try:
            yield from self._batches(iteration, comparing=comparing)
            complete = True
        finally:
            # Reached by break and by exceptions, too, and by the garbage collector for a generator that was dropped.
            iteration.is_over = True
            if not complete and iteration is self._iteration:
                if self._loop.leave(iteration):
                    self._tell_repeated(iteration)
                else:  # nothing was trained on: it does not count
                    self._begin_at(*self._start)
        self._loop.end(iteration, complete=True)
        if self._loop.is_training():
            self._tell_repeated(iteration)
        sampled = self._source.drawn(self._seed, self._epoch)
        if sampled and self._communicator.world_size > 1 and self._loop.is_training():
            self._check_same_order()  # not before the epoch, where one rank alone may look at a batch
        self.epoch = self._epoch + 1

    def _tell_repeated(self, iteration: Iteration) -> None:
        """Warn if another loader of the same line was trained on in the same random order."""
        if self._given.is_random and self._loop.repeats(iteration, self._made_at):
            self._communicator.warn(
                f"a second loader that was made at {self._made_at} has shuffled as the first did, and drawn the same "
                f"random augmentations: both follow from the seed and the epoch, which was {self._epoch} in both. Keep "
                "one loader, whose dataset may change between epochs, or set loader.epoch to the number of the round."
            )

    def _batches(self, iteration: Iteration, *, comparing: bool) -> Iterator[Any]:
        """Yield the batches that this rank is to get, and notify the loop of each micro-batch of all ranks."""
        place = self._seed, self._epoch, *self._start
        # A fingerprint that the dataset declares was compared already.
        if comparing and isinstance(self._source, MapStyle) and not is_declared(self.dataset):
            batches = self._source.batches(*place, self._check_same_samples)
        else:
            batches = self._source.batches(*place)
        for micro_batch, batch in self._loop.begin(iteration, feed(batches, self._communicator.device)):
            if not self._loop.hand_out(micro_batch, iteration, batch):
                continue  # a stand-in that nothing needs
            yield batch
            if iteration is not self._iteration:
                raise UsageError("another iteration over this loader was started: it supports one at a time.")

    def _check_same_data(self) -> None:
        """Check that all ranks were given the same data. Collective.

        Raises:
            DataError: they were not; on every rank.
        """
        state = self.state_dict()
        facts = {f"the {key.replace('_', ' ')}": state[key] for key in ("length", "fingerprint", "global_batch_size")}
        if self._given.division is not None:
            facts.update(self._given.division.facts)
        difference = difference_between_ranks(self._communicator, facts)
        if difference is not None:
            raise DataError(
                f"the ranks passed different data to a loader: {difference[0]} is {difference[1]}. {_WHOLE} (For an "
                "iterable dataset that is sharded already, pass sharded=True.)"
            )
        if isinstance(self._source, MapStyle):
            self._source.plan(self._seed, self._epoch)  # draws from the sampler
            self._check_same_order()

    def _check_same_samples(self, digests: Sequence[tuple[int, int]]) -> None:
        """Check that all ranks have read the same samples. Collective.

        Args:
            digests: the index and a digest of each; none if this rank can't tell.

        Raises:
            DataError: they have not; on every rank.
        """
        known = [digest for _, digest in digests]
        everywhere = self._communicator.all_gather(torch.tensor(known + [-1] * (COMPARED - len(known)))).cpu()
        differing = (everywhere != everywhere[0]).nonzero().tolist()
        if differing and (everywhere[:, 0] >= 0).all():
            self._compared = None
            rank, number = differing[0]
            raise DataError(
                f"the ranks passed different data to a loader: sample {digests[number][0]} on rank {rank} is another "
                f"than on rank 0. {_WHOLE} If only rounding or a path differs, give the dataset a string attribute "
                "fingerprint, which is then compared instead."
            )

    def _check_same_order(self) -> None:
        """Check that a sampler has drawn the same indices for this epoch on all ranks. Collective.

        Raises:
            DataError: it has not; on every rank.
        """
        if not are_identical(self._communicator, {"order": self._source.drawn(self._seed, self._epoch)}):
            raise DataError(
                "a loader's sampler yields other indices on one rank than on another, so samples would be left out and "
                "repeated: draw its random numbers from python's, numpy's or torch's global generators, which the "
                "loader seeds alike, or from a generator that is seeded with the epoch (set_epoch). It must yield the "
                "indices of all ranks, which the loader divides."
            )

    @property
    def position(self) -> dict[str, Any]:
        """The part of ``state_dict`` that changes from step to step: cheap enough to record at every boundary."""
        iteration = self._iteration
        reached = None
        if iteration is not None:
            reached = iteration.trained_to if iteration.trained else iteration.yielded_to
        consumed, steps = reached or self._start  # within the first window, nothing is consumed yet
        readers = self._source.readers(self._epoch)
        return {"epoch": self._epoch, "consumed": consumed, "steps": steps, "readers": readers}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, as ints and strings that are equal on all ranks. Not collective.

        In training, a batch is consumed when it has been used in a backward, and before the first backward, or in an
        evaluation, when it has been yielded. Batches that were only prefetched are not consumed, nor are batches of an
        iteration that ended before anything was trained on. The batches of an accumulation window are consumed
        together at its end: within a window, the state is the one at its start.

        Of a sharded dataset with ``state_dict``, it also has the states of the shards that this rank reads. A
        checkpoint of the strategy has the states of all; a shard without one is read again up to the position.
        """
        drawn, position = self._source.drawn(self._seed, self._epoch), self.position
        return {
            "seed": self._seed,
            **position,
            "length": self._given.samples if hasattr(self.dataset, "__len__") else None,
            "fingerprint": fingerprint(self.dataset),
            "global_batch_size": self.global_batch_size,
            # With the epoch that it is of: at the end of an epoch, the position may be the previous one's.
            "order": [self._epoch, drawn] if drawn else None,
            **self._source.seeks(self._epoch, position["steps"]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` in the next iteration, with any number of ranks and any backend.

        Consumed samples are not read again, except in an iterable dataset without a state to continue from, where they
        are skipped. Order and random numbers follow from the state's seed from now on,
        with a warning if the strategy's seed differs. If the global batch size differs, the rest of the epoch is split
        into batches of the new size, with a warning: each sample is still yielded once, but the batches are not those
        of an uninterrupted run. A dataset that shards itself (``sharded=True``) can continue within an epoch only with
        the same number of ranks and workers.

        Raises:
            CheckpointError: the state belongs to other data, or can't be continued from.
        """
        current = self.state_dict()
        check_same_data(state, current)
        if state["consumed"]:
            self._check_position(state)
        if state["seed"] != self._config.seed:  # not refused: the script may want other random numbers from here on
            self._communicator.warn(
                f"the order of the data still follows from the saved run's seed {state['seed']}, although the seed of "
                f"this run is {self._config.seed}."
            )
        if state["global_batch_size"] != self.global_batch_size:
            self._communicator.warn(
                f"the global batch size was {state['global_batch_size']} and is now {self.global_batch_size}: epoch "
                f"{state['epoch']} continues after {state['consumed']} samples in batches of the new size."
            )
        # Only now: a refused state leaves the loader where it was.
        self._seed, self.epoch = state["seed"], state["epoch"]
        self._resumed = state["epoch"] > 0
        self._begin_at(state["consumed"], state["steps"])
        if state["consumed"] and isinstance(self._source, MapStyle):
            self._given.held = state["length"]  # the data may grow before the next iteration, and the epoch stays

    def _check_position(self, state: Mapping[str, Any]) -> None:
        """Check that this loader can continue within an epoch, and have a stream do so.

        Raises:
            CheckpointError: this loader can't continue from this position; the message names what differs.
        """
        if isinstance(self._source, Iterable):
            self._source.resume(state)
            return
        if self._compared is None:
            self._source.forget()
        seed, epoch = state["seed"], state["epoch"]
        fits = self._source.plan(seed, epoch).can_start_at(state["consumed"])
        of_epoch, order = state["order"] or (None, "")  # drawn by a sampler, if there was one
        if not fits or (of_epoch == epoch and order != self._source.drawn(seed, epoch)):
            raise CheckpointError(
                f"epoch {epoch} can't continue after {state['consumed']} samples: the sampler yields other indices or "
                "batches, or fewer samples, than when the state was saved. Use the same sampler, and draw its random "
                "numbers from python's, numpy's or torch's global generators, or from one that is seeded with the "
                "epoch (set_epoch); or start a new epoch: set loader.epoch."
            )
