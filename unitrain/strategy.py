"""The strategy: what a training script talks to. It builds the parts of a run in order, and delegates to them."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import TypeVarTuple, Unpack

from unitrain.backend import Backend
from unitrain.checkpoint import Checkpoint, files
from unitrain.communicator import Communicator, ReduceOp
from unitrain.config import StrategyConfig
from unitrain.data import Loader
from unitrain.data.options import LoaderOptions
from unitrain.device import pick_device
from unitrain.errors import UsageError
from unitrain.job.job import join
from unitrain.launch.detect import Launch
from unitrain.metrics import torchmetric
from unitrain.metrics.meter import Meter
from unitrain.metrics.throughput import Throughput
from unitrain.pulse import CLOSING
from unitrain.training import batch_norm, preparation
from unitrain.training.in_sync import check_in_sync
from unitrain.training.loop import TrainingLoop
from unitrain.training.loss import Weight
from unitrain.training.precision import Precision
from unitrain.training.prepared import PreparedModules
from unitrain.training.step import StepResult, TrainingStep

if TYPE_CHECKING:
    from unitrain.data.progress import ProgressBar

T = TypeVar("T")
U = TypeVar("U")
Ts = TypeVarTuple("Ts")


@final
class Strategy:
    """How a script's processes, devices and gradients work together. Made by ``unitrain.init``.

    Args:
        backend: the class of the backend that communicates.
        config: the resolved settings.
        launch: who started this process.

    Attributes:
        config: the resolved settings.
        launch: who started this process, with its local rank and world size.
        rank: rank of this process.
        world_size: number of processes (1 under DataParallel, whose devices are ``devices``).
        local_rank: rank of this process among those on its host.
        node_rank: number of this host.
        device: where this process computes.
        devices: all devices that this process computes on.
        is_main: whether this is rank 0.
    """

    def __init__(self, backend: type[Backend], config: StrategyConfig, launch: Launch) -> None:
        self.config = config
        self.launch = launch
        self.local_rank: int = launch.local_rank
        engine = backend(config, launch, pick_device(config.device, launch))
        self.device: torch.device = engine.device
        self.devices: tuple[torch.device, ...] = engine.devices
        self._communicator, self._job = join(engine, config, launch)
        self.rank: int = self._communicator.rank
        self.world_size: int = self._communicator.world_size
        self.is_main: bool = self._communicator.is_main
        self.node_rank: int = self._job.node_rank
        self._precision = Precision(config.precision, self.device)
        self._prepared = PreparedModules(distributed=self.world_size > 1)
        pass_boundary = self._job.stopping.pass_boundary
        self._step = TrainingStep(
            self._communicator, engine, self._prepared, self._precision.scaler, pass_boundary, config
        )
        self._loop = TrainingLoop(self._step, pass_boundary)
        self._preparation = preparation.Preparation(
            self._communicator, engine, self._precision, self._prepared, self._step.register, config
        )
        self._checkpoint: Checkpoint | None = None
        self._throughput: Throughput | None = None

    # --------------------------------------------------------------------------------------------------- training

    @overload
    def prepare(self, one: T, /) -> T: ...

    @overload
    def prepare(self, first: T, second: U, /, *more: Unpack[Ts]) -> tuple[T, U, Unpack[Ts]]: ...

    def prepare(self, first: Any, /, *more: Any) -> Any:  # type: ignore[misc]  # mypy on TypeVarTuple
        """Make modules, optimizers and schedulers ready for this run, and return them in the order given.

        A module is moved to the device, its BatchNorm is converted (with ``sync_batchnorm``), rank 0's weights and
        buffers are copied to all ranks, its forward enters autocast, and it is wrapped where the backend wraps.
        Parameters stay the same objects, and an optimizer is returned as it was given, with rank 0's state: loaded
        state and schedulers made before stay valid. A module may be prepared before its optimizer exists. Collective.

        Raises:
            UsageError: something else was given, or it was prepared before.
            CommunicationError: the ranks' models differ in names, shapes or dtypes.

        Example:
            >>> model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
        """
        prepared = self._preparation.prepare((first, *more))
        return prepared if more else prepared[0]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context to compute a loss in. A prepared model's forward enters it by itself."""
        return self._precision.autocast()

    def step(
        self,
        loss: Tensor,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Any = None,
        *,
        weight: Weight | None = None,
    ) -> StepResult:
        """Do all that follows a loss: backward, average, unscale, clip, check, step, zero the gradients. Collective.

        Within an accumulation window only backward runs; the optimizer (and the scheduler) moves at its end. The
        gradient is that of the mean over all samples of the window on all ranks.

        Args:
            loss: scalar, the mean over this rank's samples of the batch.
            optimizer: what to step; several share the one loss.
            scheduler: stepped when the optimizer is.
            weight: what this rank's mean counts for: the number of its tokens, say. Default: the number of samples
                of the batch that the strategy's loader yielded last; without such a loader all ranks are equal.

        Raises:
            UsageError: the loss is no scalar with a gradient, or a micro-batch was left out.
            NonFiniteError: a loss or gradient is not finite, under ``on_nonfinite="raise"``.
            Stopped: the same under ``on_nonfinite="stop"``.
        """
        if isinstance(optimizer, Optimizer):
            self._step.backward(loss, (optimizer,), weight=weight)
            return self._step.update(optimizer, scheduler)
        if not isinstance(optimizer, Sequence) or not optimizer:
            raise UsageError(
                f"step() needs an optimizer of torch, or a list of at least one, not {type(optimizer).__name__}."
            )
        self._step.backward(loss, optimizer, weight=weight)
        results = [self._step.update(one) for one in optimizer]
        if scheduler is not None and results[0].stepped:
            scheduler.step()
        return results[0]

    def backward(
        self,
        loss: Tensor,
        optimizer: Optimizer | None = None,
        *,
        sync: bool | None = None,
        weight: Weight | None = None,
    ) -> None:
        """The first half of ``step``: for several losses on one optimizer, or several optimizers. Collective.

        Until ``update`` has ended the averaging, gradients are not complete. What is to see or change them is a step
        pre-hook of the optimizer (``optimizer.register_step_pre_hook``).

        Args:
            loss: as in ``step``.
            optimizer: whose parameters get gradients; needed where there are several optimizers (a GAN's), else
                those of all prepared optimizers do.
            sync: whether this backward ends the window, and communicates; default: as the loader or the count of
                ``update`` calls says.
            weight: as in ``step``; losses of one micro-batch share the first one's.
        """
        self._step.backward(loss, None if optimizer is None else [optimizer], sync=sync, weight=weight)

    def update(self, optimizer: Optimizer, scheduler: Any = None) -> StepResult:
        """The second half of ``step``, once for each micro-batch and optimizer. Collective."""
        return self._step.update(optimizer, scheduler)

    @property
    def global_step(self) -> int:
        """Optimizer steps that the run has made, those before it was resumed included."""
        return self._step.global_step

    @property
    def training_step(self) -> TrainingStep:
        """What ``step``, ``backward`` and ``update`` call, for tools that measure it."""
        return self._step

    @contextmanager
    def evaluation(self, *modules: nn.Module) -> Iterator[None]:
        """Evaluate: eval mode, no gradients, and BatchNorm statistics that all ranks agree on. Collective.

        Running statistics of layers that are not synchronised are averaged over the ranks first. Afterwards every
        layer is in the mode it was in.
        """
        if not modules:
            raise UsageError("evaluation() needs the model, or models, to be evaluated.")
        modes = [(layer, layer.training) for module in modules for layer in module.modules()]
        batch_norm.average_statistics(modules, self._communicator)
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
        """Return a loader of this rank's share of ``dataset``; ``unitrain.data.Loader`` describes its options.

        Example:
            >>> train = strategy.dataloader(train_set, global_batch_size=256, shuffle=True, num_workers=4)
        """
        return Loader(self._communicator, self._loop, self.config, self.launch.local_world_size, dataset, **options)

    def progress(self, loader: Loader, description: str = "") -> ProgressBar:
        """Return what iterates over ``loader`` and shows samples a second and the time left on rank 0's terminal."""
        from unitrain.data.progress import ProgressBar  # it imports rich, which few scripts want

        return ProgressBar(loader, description, is_main=self.is_main)

    def meter(self) -> Meter:
        """Return a sum and mean over all ranks that is reduced only when it is read."""
        return Meter(self._communicator)

    def metric(self, metric: T) -> T:
        """Let a torchmetrics ``Metric`` synchronise through this strategy, on any backend; it is returned as it is."""
        return torchmetric.synchronise(metric, self._communicator)

    def throughput(self) -> Throughput:
        """Return what measures samples a second, the split of the time and peak memory, from the first call on."""
        if self._throughput is None:
            self._throughput = Throughput(self._communicator, self.devices)
            self._step.observe(self._throughput)
            self._loop.observe(self._throughput)
        return self._throughput

    def check_in_sync(self, module: nn.Module) -> None:
        """Compare a model's parameters and buffers over the ranks, by checksums of their bits. Collective.

        The running statistics of BatchNorm layers that are not synchronised are each rank's own, and left out.

        Raises:
            CommunicationError: on every rank, naming the first tensor that differs and the ranks where it does.
        """
        check_in_sync(self._communicator, self._prepared.unwrap(module))

    # ------------------------------------------------------------------------------------ collective communication

    @property
    def communicator(self) -> Communicator:
        """What communicates with the other ranks, for code that needs no more of a strategy."""
        return self._communicator

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return a new tensor: the element-wise sum, mean, maximum or minimum over all ranks. Collective.

        Args:
            tensor: dense and real, of the same shape and dtype on all ranks, on any device. Booleans are counted
                by ``sum``.
            op: ``sum``, ``mean`` (of floating-point tensors), ``max`` or ``min``.

        Raises:
            UsageError: another op, or a tensor that can't be reduced.
            CommunicationError: the other ranks did not take part within ``timeout_s``.
        """
        return self._communicator.all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, stacked along a new first dimension. Collective.

        Raises:
            UsageError: on all ranks, where they are not of one shape and dtype.
        """
        return self._communicator.all_gather(tensor)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return a new tensor: rank ``src``'s. It has the same shape and dtype on all ranks. Collective."""
        return self._communicator.broadcast(tensor, src)

    def all_gather_object(self, value: T) -> list[T]:
        """Return all ranks' picklable objects, in rank order; tensors in them are on the CPU. Collective."""
        return self._communicator.all_gather_object(value)

    def broadcast_object(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s picklable object; tensors in it are on the CPU of other ranks. Collective.

        The other ranks' values are not read.
        """
        return self._communicator.broadcast_object(value, src)

    def barrier(self) -> None:
        """Wait until every rank has come here. Collective."""
        self._communicator.barrier()

    # ------------------------------------------------------------------------------------------------ rank-0 I/O

    def print(self, *values: Any, **keywords: Any) -> None:
        """``print`` on rank 0 only, flushed at once."""
        if self.is_main:
            builtins.print(*values, **{"flush": True, **keywords})

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on rank 0 first, then on the others: to download or build something once. Collective."""
        if not self.is_main:
            self.barrier()
        try:
            yield
        finally:
            if self.is_main:
                self.barrier()

    def on_main(self, action: Callable[[], T]) -> T:
        """Do something on rank 0, and return on every rank what it returns there. Collective.

        Args:
            action: returns something picklable, or raises a ``UnitrainError``, which is raised on every rank.
        """
        return self._communicator.on_main(action)

    def save(self, value: Any, path: str | Path) -> None:
        """Write ``value`` once, from rank 0, so that a reader sees the old file or the whole new one. Collective.

        Modules, optimizers and schedulers inside dicts and lists are saved as their state, without wrappers' prefixes.
        BatchNorm's running statistics that are not synchronised are averaged over the ranks first.

        Raises:
            CheckpointError: rank 0 could not write, or ``load`` could not read it; raised on every rank.
            UsageError: only some ranks gave modules.
        """
        files.save(self._communicator, self._prepared, value, files.local(path))

    def load(self, path: str | Path) -> Any:
        """Read what ``save`` wrote, on rank 0, and return it on every rank, on the CPU. Collective.

        Raises:
            CheckpointError: there is no such file, or it holds more than tensors and plain data; on every rank.
        """
        return files.load(self._communicator, files.local(path))

    def checkpoint(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        keep: int = 3,
        background: bool = True,
        **objects: Any,
    ) -> Checkpoint:
        """Return what saves and resumes a run's objects together; see ``unitrain.checkpoint.Checkpoint``. Collective.

        From now on SIGTERM, SIGINT and SIGUSR1 stop the run: all ranks at the same boundary, with a checkpoint.

        Args:
            folder: holds one folder for each saved step.
            config: the script's own settings, as plain data (what JSON can hold): resuming under others is refused.
            keep: how many to keep.
            background: write while training goes on.
            **objects: modules, optimizers, schedulers, loaders and dicts of plain values, by name.

        Raises:
            UsageError: an object has no state, or another checkpoint is open.
            CheckpointError: the folder can't be written to, or has too little space; on every rank.
        """
        if self._checkpoint is not None:
            raise UsageError("a strategy has one checkpoint: give it all objects, or close() the first.")
        self._checkpoint = Checkpoint(
            self._communicator,
            self._prepared,
            self._step,
            self._precision.scaler,
            self._job.stopping.request,
            self._release_checkpoint,
            self.config,
            files.local(folder),
            objects,
            config=config or {},
            keep=keep,
            background=background,
        )
        # Without a checkpoint there is nothing to save, and a signal does at once what it does to any program.
        self._job.stopping.listen(self._checkpoint)
        return self._checkpoint

    def _release_checkpoint(self) -> None:
        self._checkpoint = None
        self._job.stopping.close()

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's own module behind what ``prepare`` or ``torch.compile`` returned."""
        return self._prepared.unwrap(module)

    def export(self, module: nn.Module) -> nn.Module:
        """Return a plain copy on the CPU, in eval mode: no wrapper, no hook of ours, BatchNorm as it was."""
        return preparation.export(self._prepared.unwrap(module))

    # -------------------------------------------------------------------------------------------------- life time

    def close(self) -> None:
        """End communication. Waits for the other ranks, unless this process is failing. A second call does nothing."""
        job = self._job
        if job.ended:
            return
        job.ended = True
        try:
            if not job.failed:  # a failing process keeps its watch, to say why it fails
                with job.pulse.within(CLOSING):
                    if self._checkpoint is not None:
                        self._checkpoint.close()
                    self.barrier()
                job.leave()
        finally:
            job.stopping.close()
            self._step.close()
            self._prepared.release()
            self._communicator.close(failed=job.failed)

    @property
    def closed(self) -> bool:
        """Whether communication has ended."""
        return self._communicator.closed

    def __enter__(self) -> Strategy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._job.failed = self._job.failed or kind is not None
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """A copied object that holds its strategy shares it."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError("a strategy can't be pickled: save a model's state with strategy.save, or strategy.export it.")
