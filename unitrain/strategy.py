"""``Strategy``, the interface of a training script. It builds the parts of a run in order and delegates to them."""

from __future__ import annotations

import atexit
import builtins
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, final, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import TypeVarTuple, Unpack

from unitrain import features
from unitrain.checkpoint import Checkpoint, files
from unitrain.checkpoint.contents import Contents
from unitrain.checkpoint.origin import Origin
from unitrain.communication import gathering
from unitrain.communication.backend import Backend
from unitrain.communication.batch_group import BatchGroup
from unitrain.communication.communicator import Communicator, ReduceOp
from unitrain.config import StrategyConfig
from unitrain.data import Loader
from unitrain.data.options import LoaderOptions
from unitrain.data.order.shares import reduced
from unitrain.device import pick_device
from unitrain.errors import ConfigError, UsageError
from unitrain.job.excepthook import FailureHook
from unitrain.job.job import current, join
from unitrain.job.watch.stopping import Stopped
from unitrain.launch.copies import unmark_rank
from unitrain.launch.detect import Launch
from unitrain.process import exit_now
from unitrain.pulse import CLOSING
from unitrain.training import weighted_means
from unitrain.training.feature import Feature
from unitrain.training.loop.closures import Closures
from unitrain.training.loop.loop import TrainingLoop
from unitrain.training.loop.sockets import Sockets
from unitrain.training.loop.step import StepResult, TrainingStep
from unitrain.training.meter import Meter
from unitrain.training.models import batch_norm, preparation
from unitrain.training.models.buffers import BufferSync
from unitrain.training.models.in_sync import InSyncCheck, check_in_sync
from unitrain.training.models.materialising import Initialise
from unitrain.training.models.precision import Precision, check_precision
from unitrain.training.models.prepared import Average, PreparedModules
from unitrain.training.models.supported import check_scheduler
from unitrain.training.trial import Trial, Trials
from unitrain.training.windows.weights import ScriptLosses, ScriptWeights, Weight

T = TypeVar("T")
FeatureType = TypeVar("FeatureType", bound=Feature)
U = TypeVar("U")
Ts = TypeVarTuple("Ts")


@final
class Strategy:
    """Runs a training script on one or many devices and processes. Made by ``unitrain.init``.

    Attributes:
        launch: how this process was started: launcher, local rank, local world size.
        rank: rank of this process.
        world_size: number of processes (1 under DataParallel).
        device: the device of this process; under DataParallel, its first.
        is_main: whether this is rank 0.
        batch_group: the ranks that get the batches of this rank, and compute with parts of them; this rank alone,
            unless a setting has several ranks share batches.
    """

    def __init__(self, backend: type[Backend], config: StrategyConfig, launch: Launch) -> None:
        self.launch = launch
        self._backend = made = backend(config, launch, pick_device(config.device, launch))
        self.device: torch.device = made.device
        check_precision(config.precision, self.device)
        self._communicator, self._job = join(made, config, launch)
        self.rank: int = self._communicator.rank
        self.world_size: int = self._communicator.world_size
        self.is_main: bool = self._communicator.is_main
        shards = self._communicator.sharding.of_parameters
        self._precision = Precision(config.precision, self.device, self._communicator if shards else None)
        self._prepared = PreparedModules(reduced(config.shares or (1,) * self.world_size))
        self._sockets = sockets = Sockets(self._communicator, made, self._prepared, config, self._job.stopping)
        self._hooks = sockets.hooks
        sockets.passes.append(self._precision)
        self._add_features()
        # Without its scale, a resumed run would begin with steps that overflow.
        if self._precision.scaler is not None:
            sockets.states.add("scaler", self._precision.scaler)
        self._step = TrainingStep(sockets, self._precision.scaler)
        self._closures = Closures(sockets, self._step)
        self.batch_group: BatchGroup = sockets.batch_group
        self._loop = TrainingLoop(self._step, sockets)
        # In rounds, the ranks have different models until the end of one, and different buffers.
        if self._step.averaging.in_step and config.broadcast_buffers:
            self._hooks.add_hook(BufferSync(self._communicator, self._prepared))
        if self.world_size > 1:
            in_sync = InSyncCheck(self._communicator, self._prepared, self._step.windows.on_all_ranks)
            self._hooks.add_hook(in_sync)
            if self._step.averaging.in_step:
                self._step.at_window_end(in_sync.after_first_step)
        self._preparation = preparation.Preparation(
            self._communicator,
            made,
            sockets.passes,
            self._prepared,
            self._step.windows.register,
            self._step.batches.current_batch,
            self._step.windows.forget_dropped,
            config,
            wraps=self.world_size == 1 or self._step.averaging.in_step,
            reader=sockets.readers.rank,
        )
        self._trials = Trials(sockets, self._step, self._preparation, self._job.compare)
        atexit.register(self._close_at_exit)

    def _add_features(self) -> None:
        """Add the features that the settings turn on. If one refuses them, on all ranks alike, leave the job."""
        try:
            for feature in features.make(self._sockets.config):
                feature.plug_in(self._sockets)
        except ConfigError:
            self._job.abandon()
            for close in self._hooks.at_close:
                close()
            self._communicator.collectives.close(failed=True)
            raise

    @property
    def config(self) -> StrategyConfig:
        """The resolved settings; in a trial, with its seed."""
        return self._sockets.config

    # --------------------------------------------------------------------------------------------------- training

    @overload
    def prepare(self, only: T, /, *, initialise: Initialise = False) -> T: ...

    @overload
    def prepare(
        self, first: T, second: U, /, *more: Unpack[Ts], initialise: Initialise = False
    ) -> tuple[T, U, Unpack[Ts]]: ...

    def prepare(  # type: ignore[misc]  # mypy on TypeVarTuple
        self, first: Any, /, *more: Any, initialise: Initialise = False
    ) -> Any:
        """Prepare modules, optimizers and schedulers for this run, and return them in the same order. Collective.

        A module is moved to the device, unless the script has put its layers on several, where they stay. Features that
        are turned on change its layers, rank 0's parameters and buffers are copied to all ranks, its
        forward runs under autocast (with ``bf16`` or ``fp16``), and the backend wraps it if it needs to. Parameters
        stay the same objects, unless the backend shards them: then the module and its optimizers get shards in their
        place. An optimizer is returned as it is, with rank 0's state, so that loaded state and existing schedulers stay
        valid. A module may be prepared before its optimizer exists. What the script drops later, such as the model of a
        fold, is freed when all ranks have dropped it, at the next call at the latest.

        Parameters on the meta device get memory and, with ``initialise``, values that follow from the seed and the
        names of the modules: the same on any number of ranks and any backend.

        Args:
            first: a module, an optimizer or a scheduler.
            more: others.
            initialise: what gives values to a model that was built under ``torch.device("meta")``. False leaves the
                weights, which are NaN, to a file of weights or a checkpoint. True calls ``reset_parameters`` of each
                module: what constructors do to weights or buffers in another way is lost. A function is called with
                each module after ``reset_parameters``, such as Hugging Face's ``model._init_weights``.

        Raises:
            UsageError: an argument is of another type, or was prepared before; or a parameter is not initialised.
            CommunicationError: the ranks' models or optimizers differ.

        Example:
            >>> model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
        """
        prepared = self._preparation.prepare((first, *more), initialise)
        return prepared if more else prepared[0]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context for computing a loss. The forward of a prepared model enters it automatically."""
        return self._precision.autocast()

    def step(
        self,
        loss: ScriptLosses,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Any = None,
        *,
        weight: ScriptWeights = None,
        batch: Any = None,
    ) -> StepResult:
        """Run backward, average, unscale, check and clip the gradients, step, and clear the gradients. Collective.

        Within an accumulation window only backward runs; the optimizer and the scheduler step at its end. The gradient
        is the gradient of the mean loss over all samples of the window on all ranks.

        Args:
            loss: scalar; the mean over this rank's samples of the batch. Or a list or dict of several, each a mean over
                something else, with ``weight``: the gradient is the sum of theirs.
            optimizer: the optimizer to step, or several that share the loss.
            scheduler: stepped when its optimizer is.
            weight: weight of this rank's mean, the number of its tokens, say. Default: the number of samples in the
                batch that the strategy's loader yielded last; without such a loader all ranks weigh the same. Of
                several losses, a list or dict of their weights. A loss of weight 0 may be NaN.
            batch: the batch that the loss is of, as its loader yielded it, or a tensor of it. Needed where several
                batches are in use, from one loader or several, and an error asks for it. Of several losses, a list or
                dict of their batches.

        Raises:
            UsageError: the loss is not a scalar that requires grad, losses and weights don't match, a micro-batch was
                left out, or the scheduler needs a metric.
            NonFiniteError: a loss or gradient is not finite, with ``on_nonfinite="raise"``.
            Stopped: a loss or gradient is not finite, with ``on_nonfinite="stop"``.

        Example:
            >>> strategy.step([class_loss, box_loss], optimizer, weight=[number_of_anchors, number_of_boxes])
        """
        if scheduler is not None:
            check_scheduler(scheduler)
        if isinstance(optimizer, Optimizer):
            return self._step.step(loss, optimizer, scheduler, weight, batch)
        if not isinstance(optimizer, Sequence) or not optimizer:
            raise UsageError(
                f"step() takes a torch optimizer, or a non-empty list of them, not {type(optimizer).__name__}."
            )
        self._step.backward(loss, optimizer, weight, batch)
        results = [self._step.update(each) for each in optimizer]
        # The scheduler steps with its optimizer: the others may have skipped the step, or not.
        scheduled = getattr(scheduler, "optimizer", None)
        number = next((i for i, each in enumerate(optimizer) if each is scheduled), 0)
        if scheduler is not None and results[number].stepped:
            self._step.step_scheduler(scheduler)
        # An overflow, say, may be in the gradients of one of them only.
        return results[0]._replace(skipped=any(result.skipped for result in results))

    def backward(
        self,
        loss: ScriptLosses,
        optimizer: Optimizer | None = None,
        *,
        weight: ScriptWeights = None,
        batch: Any = None,
    ) -> None:
        """Run the first half of ``step``, for several losses with one optimizer, or several optimizers. Collective.

        Gradients are complete only within ``update``. To read or change them, use a step pre-hook of the optimizer
        (``optimizer.register_step_pre_hook``).

        Args:
            loss: as in ``step``.
            optimizer: the one of the parameters that get gradients. Required if there are several optimizers (in a
                GAN). Default: all prepared optimizers.
            weight: as in ``step``. Losses of one micro-batch share the weight of the first.
            batch: as in ``step``.
        """
        self._step.backward(loss, None if optimizer is None else [optimizer], weight, batch)
        self._step.windows.remember_gradients()

    def update(
        self, optimizer: Optimizer, scheduler: Any = None, *, closure: Callable[[], Any] | None = None
    ) -> StepResult:
        """Run the second half of ``step``, once per micro-batch and optimizer. Collective.

        Without a ``backward`` before it, it takes the gradients that the script has set as ``grad``, the same on all
        ranks: they are checked, clipped and stepped with, but not averaged.

        Args:
            optimizer: the optimizer.
            scheduler: as in ``step``.
            closure: for optimizers that evaluate the loss several times in a step, such as LBFGS. A function without
                arguments that computes the loss, calls ``backward`` (or sets averaged gradients) and returns the mean
                loss over all ranks. It is passed to ``optimizer.step``.

        Raises:
            UsageError: there are no gradients, or the settings need gradients that ``backward`` computes.
            CommunicationError: the gradients that the script has set differ between the ranks.
            NonFiniteError: a gradient is not finite in a later evaluation of the closure; or as in ``step``.

        Example:
            >>> strategy.update(optimizer, closure=closure)
        """
        if closure is None:
            return self._step.update(optimizer, scheduler)
        return self._closures.update(optimizer, scheduler, closure)

    def average(self, gradients: T, weight: Weight | None = None) -> T:
        """Return the mean of the ranks' gradients, for a script that computes them itself. Collective.

        It is the gradient of the mean loss over the samples of all ranks if each rank passes the gradient of the mean
        over its own, as ``torch.autograd.grad`` computes it. Gradients that a script has put together from averaged
        ones become ``grad`` of the parameters, and ``update`` steps with them.

        Args:
            gradients: a list, a tuple or a dict of dense floating-point tensors without a graph; the same structure,
                shapes and dtypes on all ranks. A None stays None: pass zeros if other ranks have a tensor.
            weight: weight of this rank's gradients, the number of its tokens, say. Default: the number of samples in
                the batch of the strategy's loader that is in use; without such a loader all ranks weigh the same. A
                stand-in has weight 0 in any case. Gradients of weight 0 may be NaN.

        Returns:
            New tensors in the same structure, with the dtypes and devices of this rank's.

        Raises:
            UsageError: gradients can't be averaged or differ in form, or weights have no mean; on all ranks.

        Example:
            >>> gradients = strategy.average(torch.autograd.grad(loss, parameters))
        """
        self._step.replicas.check("average()")
        return weighted_means.average(self._communicator, gradients, self._loop.weight(weight))

    @property
    def global_step(self) -> int:
        """Number of optimizer steps of the run so far, including those before it was resumed."""
        return self._step.global_step

    def add(self, feature: FeatureType) -> FeatureType:
        """Add a feature to the run, and return it: one of ``unitrain.features``, or a ``unitrain.Feature`` of yours.

        Args:
            feature: the feature. Each kind says what it needs, and whether adding it is collective.

        Raises:
            UsageError: it is not a feature, does not fit this run, or would average gradients in another way.

        Example:
            >>> skips = strategy.add(SkipOutliers(factor=4.0))
        """
        if not isinstance(feature, Feature):
            raise UsageError(f"add() takes a unitrain.Feature, not {type(feature).__name__}: make it a subclass.")
        known = {id(hook) for hook in self._hooks}
        feature.plug_in(self._sockets)
        if self._sockets.averaging is not self._step.averaging or self._sockets.replicas is not self._step.replicas:
            raise UsageError(
                f"{type(feature).__name__} averages gradients in another way, and the step has been built already: "
                "make it a folder of unitrain/features with a section of settings, which is plugged in before."
            )
        for hook in self._hooks:
            if id(hook) not in known:
                self._step.windows.introduce(hook)
        self._step.check_verdicts()
        return feature

    @contextmanager
    def evaluation(self, *modules: nn.Module) -> Iterator[None]:
        """Context manager for evaluation: eval mode, no gradients, BatchNorm the same on all ranks. Collective.

        Running statistics of layers that are not synchronised are averaged over the ranks first. Every layer's
        training mode is restored at the end. Of an average of weights, its model is evaluated with these.
        """
        if not modules:
            raise UsageError("evaluation() needs the model or models to evaluate: strategy.evaluation(model).")
        self._step.replicas.check("evaluation()")
        with ExitStack() as swaps:
            for begun in self._hooks.at_evaluation:
                begun()
            modules = tuple(swaps.enter_context(m.swapped()) if isinstance(m, Average) else m for m in modules)
            # By layer, not by model: a script may have frozen single BatchNorm layers.
            modes = [(layer, layer.training) for module in modules for layer in module.modules()]
            batch_norm.average_statistics(modules, self._communicator, self._prepared.shares)
            outer, self._loop.evaluating = self._loop.evaluating, True
            try:
                for module in modules:
                    module.eval()
                with torch.no_grad():
                    yield
            finally:
                self._loop.evaluating = outer
                for layer, training in modes:
                    layer.training = training

    # ---------------------------------------------------------------------------------------- data and measurement

    def dataloader(self, dataset: Any, **options: Unpack[LoaderOptions]) -> Loader:
        """Return a loader of this rank's part of ``dataset``. See ``LoaderOptions`` for the options.

        Example:
            >>> train = strategy.dataloader(train_set, global_batch_size=256, shuffle=True, num_workers=4)
        """
        return Loader(self._communicator, self._loop, self.config, self.launch.local_world_size, dataset, **options)

    def meter(self) -> Meter:
        """Return a meter: a sum and a mean over all ranks, reduced only when it is read."""
        return Meter(self._communicator, self.batch_group.size, self._step.batches.current_batch)

    def mean(self, value: Tensor, count: Weight | None = None) -> Tensor:
        """Return the mean over all ranks' samples, given the mean over this rank's, with its gradient. Collective.

        So a loss may be a function of means over the global batch, and of this rank's samples. ``step`` and
        ``backward`` compute its gradient as if one process had the whole batch. ``average`` does, with the weights that
        the mean was given: ``mean(value, count)`` and ``average(gradients, weight=count)``.

        Args:
            value: the mean over this rank's samples: a tensor of any shape, the same on all ranks. If it requires grad
                on one rank, it must on all, and all run the backward, which is collective.
            count: number of samples that this rank's mean is over, or of tokens, say. Default: as the weight in
                ``average``; in an evaluation, it is of the batch that was yielded last. If it is 0, the value may be
                NaN. As with ``gather``, ranks without samples of a batch get stand-ins in an evaluation.

        Raises:
            UsageError: values differ in form, or the counts have no mean; on all ranks.

        Example:
            >>> center = strategy.mean(model(images).mean(0))
            >>> strategy.step(((model(images) - center) ** 2).mean(), optimizer)
        """
        if isinstance(value, Tensor) and value.requires_grad:
            self._step.replicas.check("mean() of a value with a gradient")
        self._loop.gathers("mean")
        return weighted_means.mean(self._communicator, value, self._loop.weight(count))

    def check_in_sync(self, module: nn.Module) -> None:
        """Check that a model's parameters and buffers have the same bits on all ranks. Collective.

        Running statistics of BatchNorm layers that are not synchronised differ between ranks, and are left out, as are
        shards, since each rank has another one.

        Raises:
            CommunicationError: on every rank, naming the first tensor that differs and the ranks where it does.
        """
        self._step.replicas.check("check_in_sync()")
        check_in_sync(self._communicator, self._prepared.unwrap(module))

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return all of a parameter, its gradient or its state in an optimizer, where a rank may have only a shard.

        Collective if it is sharded; otherwise it returns the tensor itself.
        """
        return self._communicator.sharding.full_tensor(tensor)

    def shard_like(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor, as it has one of a parameter: the inverse of ``full_tensor``.

        Values, noise or a gradient that a script has for a whole parameter can so be used with a sharded one. If the
        parameter is not sharded, it returns the tensor itself. Not collective.

        Args:
            tensor: with the shape of the whole parameter (``parameter.shape``), and the same on all ranks: noise from a
                ``torch.Generator`` with the same seed, say.
            parameter: of a prepared module.

        Raises:
            UsageError: the shapes differ.

        Example:
            >>> with torch.no_grad():
            ...     for p in model.parameters():
            ...         p.add_(strategy.shard_like(torch.randn(p.shape, generator=generator), p), alpha=0.01)
        """
        if tensor.shape != parameter.shape:
            raise UsageError(f"the tensor has shape {[*tensor.shape]}, but the whole parameter {[*parameter.shape]}.")
        return self._communicator.sharding.shard_like(tensor, parameter)

    # ------------------------------------------------------------------------------------ collective communication

    @property
    def communicator(self) -> Communicator:
        """The communicator of this process, which also gathers and broadcasts tensors of one shape, and objects."""
        return self._communicator

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return the element-wise sum, mean, maximum or minimum over all ranks, as a new tensor. Collective.

        A sum of integers or booleans is in int64, as torch's.

        Args:
            tensor: dense and real, with the same shape and dtype on all ranks, on any device.
            op: ``sum``, ``mean`` (floating-point tensors only), ``max`` or ``min``. A NaN makes a sum or a mean NaN on
                all ranks; a maximum or minimum may ignore it.

        Raises:
            UsageError: the op or the tensor is not supported.
            CommunicationError: another rank has ended, or did not make the call within ``timeout_s``.
        """
        return self._communicator.all_reduce(tensor, op)

    def gather(self, value: T, *, differentiable: bool = False, in_order: Loader | None = None) -> T:
        """Return the rows of all ranks, though ranks may have different numbers of rows. Collective.

        Tensors are concatenated along their first dimension; of scalars, each is a row. Lists are rows, too: the lists
        of all ranks are concatenated. Dicts and tuples keep their structure. Any other object becomes a list with one
        element of each rank.

        Of ranks that share batches (``batch_group``), it takes those at the same place in their groups: each sample is
        there once if a rank passes what is of whole samples.

        A rank whose batch is a stand-in (``Loader.stand_in``) adds no rows. An evaluation that gathers in its loop gets
        stand-ins as training does, so that all ranks take part for each batch.

        Args:
            value: a tensor, a list, or a structure of them, the same on all ranks except for the number of rows.
                Elements of lists are sent as by ``communicator.all_gather_object``.
            differentiable: pass gradients back to each rank's rows, summed over the ranks. The backward is collective
                then. As ``step`` weighs each rank's loss by its share of the batch, a loss over gathered rows has the
                gradient that one process computes for the global batch.
            in_order: the loader that the rows are from, one for each sample: in its loop, of the batch that it yielded
                last, and after it, of all of its batches. They come as one process would read them: in the dataset's
                order, unless the loader shuffles or has a sampler. Without it, they come rank by rank.

        Raises:
            UsageError: structures, dtypes or other dimensions differ, or a rank has not one row for each sample of
                ``in_order``, on all ranks; or the first batch of an evaluation for which this is called has too few
                samples for all ranks.

        Example:
            >>> with strategy.evaluation(model):
            ...     parts = [strategy.gather((model(images), labels), in_order=val) for images, labels in val]
            >>> scores, labels = (torch.cat(part) for part in zip(*parts))
        """
        self._loop.gathers("gather")
        positions = None
        if in_order is not None:
            positions = in_order.sample_positions()
        has_rows = in_order is not None or not self._step.batches.current_batch.is_stand_in
        gathered: T = gathering.gather(
            self._sockets.readers, value, has_rows=has_rows, differentiable=differentiable, positions=positions
        )
        return gathered

    def barrier(self) -> None:
        """Wait until every rank has reached this call. Collective."""
        self._communicator.barrier()

    # ------------------------------------------------------------------------------------------------ rank-0 I/O

    def print(self, *values: Any, **keywords: Any) -> None:
        """Print on rank 0 only, and flush."""
        if self.is_main:
            builtins.print(*values, **{"flush": True, **keywords})

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Context manager that runs its block on rank 0 first, then on the others: for downloads, say. Collective."""
        if not self.is_main:
            self.barrier()
        try:
            yield
        finally:
            if self.is_main:
                self.barrier()

    def on_main(self, action: Callable[[], T]) -> T:
        """Call ``action`` on rank 0, and return its result on every rank. Collective.

        Args:
            action: returns an object that ``broadcast_object`` can send, or raises a ``UnitrainError``, which is then
                raised on every rank.
        """
        return self._communicator.on_main(action)

    def save(self, value: Any, path: str | Path) -> None:
        """Save ``value`` to a file on rank 0, atomically. The path may be a URL, as in ``checkpoint``. Collective.

        Modules, optimizers and schedulers, in dicts and lists too, are saved as their state dicts, without the prefixes
        that wrappers add to keys. Running statistics of BatchNorm layers that are not synchronised are averaged over
        the ranks first.

        Raises:
            CheckpointError: the file could not be written, or holds objects that ``load`` would refuse; on every rank.
            UsageError: only some ranks passed modules.
        """
        self._step.replicas.check("save()")
        files.save(self._communicator, self._prepared, value, path)

    def load(self, path: str | Path) -> Any:
        """Load a file that ``save`` wrote on rank 0, and return its content on every rank, on the CPU. Collective.

        The path may be a URL, as in ``checkpoint``.

        Raises:
            CheckpointError: the file does not exist, or holds more than tensors and plain data; on every rank.
        """
        return files.load(self._communicator, path)

    def checkpoint(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        keep: int = 3,
        background: bool = True,
        partial: bool = False,
        **objects: Any,
    ) -> Checkpoint:
        """Return a ``unitrain.checkpoint.Checkpoint``, which saves and resumes objects together. Collective.

        From now on SIGTERM, SIGINT and SIGUSR1 save a checkpoint and stop the run, on all ranks at the same step.

        Args:
            folder: the folder of the checkpoints: a path, or a URL such as ``s3://bucket/run``. Each checkpoint is a
                folder named by its step.
            config: the script's settings, as plain data (JSON types). Resuming with other values is refused.
            keep: number of checkpoints to keep, beside the best.
            background: write checkpoints while training continues.
            partial: the checkpoints lack something that the run trains with on purpose. Otherwise, the first one warns
                of an optimizer, a scheduler, a loader or a feature that is missing.
            **objects: modules, optimizers, schedulers, loaders and dicts of plain values, by name.

        Raises:
            UsageError: an object has no state, or another checkpoint is open.
            CheckpointError: the folder can't be written to, has too little space, or is in use by another job; on every
                rank.
        """
        if self._job.stopping.checkpoint is not None:
            raise UsageError("a strategy has one checkpoint: pass all objects to it, or call its close() first.")
        ranks = self._communicator
        contents = Contents(objects, self._sockets, self._step, self._preparation.keep_random_states)
        origin = Origin(self.config, dict(config or {}), ranks.world_size, contents.has_loader)
        checkpoint = Checkpoint(
            contents,
            origin,
            self._sockets,
            self._step,
            folder,
            keep=keep,
            background=background,
            incomplete=partial,
        )
        if self._job.watch is not None:
            self._job.watch.before_restart(checkpoint.folder.release)
        features.attach(checkpoint, self._sockets)
        for opened in self._hooks.at_folder:
            opened(folder)
        return checkpoint

    def trial(self, name: str, seed: int | None = None) -> AbstractContextManager[Trial]:
        """Return a context manager for a run within the run: a fold of a cross-validation, say. Collective.

        Within it, ``global_step`` counts from 0, and random numbers and the orders of loaders follow from the trial's
        seed. So it trains the same weights alone and after others. A checkpoint that is opened in it is closed at its
        end; the one outside can't be used meanwhile. At its end, the features that were added in it are removed, and
        the modules and optimizers that were prepared in it are forgotten: they can be evaluated, saved and exported,
        but not trained any more, and are free when the script has dropped them. All else is put back as it was before.

        An error may be caught outside, to go on with another trial: it must then be raised on all ranks.

        Args:
            name: the name of the trial.
            seed: its seed. Default: derived from ``strategy.config.seed`` and the name.

        Raises:
            UsageError: it is begun within a loop over a loader, an accumulation window or an evaluation.

        Example:
            >>> for lr in (0.01, 0.1):
            ...     with strategy.trial(f"lr-{lr}"):
            ...         scores[lr] = train(strategy, lr)
        """
        return self._trials.run(name, seed)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the original module of a prepared or compiled one."""
        return self._prepared.unwrap(module)

    def export(self, module: nn.Module) -> nn.Module:
        """Return a plain copy on the CPU in eval mode, without wrappers, hooks or changes by features.

        Collective if the module is sharded: every rank gets a whole copy.

        Of an average of weights, it is a copy of its model with the averaged weights.
        """
        if isinstance(module, Average):
            with module.swapped() as averaged:
                return self.export(averaged)
        self._step.replicas.check("export()")
        return preparation.export(self._prepared.unwrap(module), self._backend, self._sockets.passes)

    # -------------------------------------------------------------------------------------------------- life time

    def close(self) -> None:
        """End communication. Waits for the other ranks, unless this process is failing. Further calls do nothing."""
        job, stopping = self._job, self._job.stopping
        if job.ended:
            return
        if job.pulse.trial and not job.failed:
            raise UsageError(f"close() was called within trial {job.pulse.trial!r}: leave it first.")
        # At once: after an error below, close() is called again at exit.
        job.ended = True
        try:
            if not job.failed:  # a failing process keeps its watch, to report the error
                with job.pulse.within(CLOSING):
                    job.meet(FailureHook.exit_code)
                    self._trials.close_ended()
                    if stopping.checkpoint is not None:
                        stopping.checkpoint.close()
                    self.barrier()
                self._step.end()
                job.leave()
        finally:
            left = filter(None, [*self._trials.ended, stopping.checkpoint])  # if the run fails
            stopping.close()
            for close in self._hooks.at_close:
                close()
            for checkpoint in left:
                checkpoint.abandon()
            self._trials.ended.clear()  # they have wrapped models, with what they communicate by
            self._step.close()
            self._communicator.collectives.close(failed=job.failed)
            unmark_rank()
            atexit.unregister(self._close_at_exit)  # which keeps the strategy, and with it models, in memory

    def _close_at_exit(self) -> None:
        """Close at exit. An error ends the process as it does in a script; Python would ignore it, and exit with 0."""
        if current() is None:  # a child that the script has forked: the strategy is its parent's
            return
        try:
            self.close()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            exit_now(1)

    def __enter__(self) -> Strategy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._job.failed = self._job.failed or kind is not None
        if isinstance(error, SystemExit) and not isinstance(error, Stopped):
            self._job.report_exit(error.code)
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """Return the same object: copies of an object that holds a strategy share it."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError("a strategy can't be pickled: use strategy.save or strategy.export for a model.")
