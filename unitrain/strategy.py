"""The strategy: what a training script talks to, and the narrow interface that a backend fills.

A backend implements ``_start``, ``_all_reduce``, ``_all_gather`` and ``_broadcast``, and ``_close`` where there is
something to close. All else is derived from these, once, for every backend. A backend overrides ``_wrap_model``,
``_arm`` and ``_watch_gradients`` only where its engine averages gradients in a way of its own.
"""

from __future__ import annotations

import builtins
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.checkpoint import Checkpoint, files
from unitrain.communicator import Collectives
from unitrain.config import StrategyConfig
from unitrain.data import Loader
from unitrain.device import pick_device
from unitrain.errors import LaunchError, UnitrainError, UsageError
from unitrain.job.handshake import introduce
from unitrain.job.pulse import CLOSING, Pulse
from unitrain.job.stopping import Stopping
from unitrain.job.watch import Watch
from unitrain.launch.detect import Launch
from unitrain.metrics import meter
from unitrain.metrics.meter import Meter
from unitrain.metrics.throughput import Throughput
from unitrain.training import batch_norm
from unitrain.training.gradients import GradientReducer
from unitrain.training.in_sync import check_in_sync
from unitrain.training.precision import AUTOCAST_DTYPE, Precision
from unitrain.training.preparation import Preparation
from unitrain.training.step import StepResult, TrainingStep, Weight

if TYPE_CHECKING:
    from unitrain.data.progress import ProgressBar

T = TypeVar("T")


class Strategy(Collectives):
    """How a script's processes, devices and gradients work together. Made by ``unitrain.init``.

    Attributes:
        config: the resolved configuration.
        launch: who started this process.
        rank: number of this process, from 0.
        world_size: number of processes (1 under DataParallel, whose devices are ``devices``).
        local_rank: number of this process on its host.
        local_world_size: number of processes on this host.
        node_rank: number of this host.
        device: where this process computes.
        devices: all devices that this process computes on.
        is_main: whether this is rank 0.
    """

    name: ClassVar[str]
    """The backend's name, as in its entry point."""
    served_by: ClassVar[str] = "see its documentation"
    """The launchers that start what this backend can use, for messages."""
    gradient_reduction: Literal["sum", "mean"] = "sum"
    """Whether the engine's gradients are the ranks' sum, or their mean."""
    matches_by_name: ClassVar[bool] = False
    """Whether the engine knows by their names which calls of the ranks belong together, and not by their order."""
    compressions: ClassVar[tuple[str, ...]] = ("none", "fp16", "bf16")
    """What ``compression`` may be under this backend."""

    def __init__(self, config: StrategyConfig, launch: Launch) -> None:
        self.config = config
        self.launch = launch
        self.local_rank: int = launch.local_rank
        self.local_world_size: int = launch.local_world_size
        self.device: torch.device = pick_device(config.device, launch)
        self.devices: tuple[torch.device, ...] = (self.device,)
        self.precision: Precision = Precision(config.precision, self.device)
        self.evaluating: bool = False
        self.failed: bool = False
        """Whether this process is ending because of an error: it then waits for nobody."""
        self.closed: bool = False
        self._closing = False
        self._checkpoint: Checkpoint | None = None
        self._armed = True
        self._reducers: list[GradientReducer] = []
        self.rank: int
        self.world_size: int
        self.rank, self.world_size = self._start()
        self.is_main: bool = self.rank == 0
        self._check_world()
        self.pulse: Pulse = Pulse()
        self.stopping: Stopping = Stopping(self)
        self.watch: Watch | None = None
        self._training_step = TrainingStep(self)
        self._throughput: Throughput | None = None
        self._preparation = Preparation(self)
        self.node_rank: int = launch.node_rank or 0
        if self.world_size > 1:
            self._meet()

    # ----------------------------------------------------------------------------------- what a backend fills in

    @classmethod
    def expected_world(cls, launch: Launch) -> int:
        """Return the world size that this backend would see under ``launch``, without starting anything."""
        return launch.world_size

    @classmethod
    def check(cls, config: StrategyConfig, launch: Launch) -> None:
        """Raise where this backend can't run, or can't honour the configuration. Called before any work.

        Raises:
            BackendError: its engine is missing.
            ConfigError: a setting can't be honoured.
        """

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Return the versions of the engine's libraries other than torch, by name. No two ranks may differ."""
        return {}

    @classmethod
    def is_engine_error(cls, error: BaseException) -> bool:
        """Whether an error is what the engine says where another rank has gone, or does not come."""
        return False

    @abstractmethod
    def _start(self) -> tuple[int, int]:
        """Start communication and return this process's rank and the world size, as the engine sees them."""

    def _close(self) -> None:
        """End communication."""

    def _wrap_model(self, module: nn.Module) -> nn.Module:
        """Return what the user calls instead of ``module``."""
        return module

    def _arm(self, sync: bool) -> None:
        """Say whether the coming forward and backward shall communicate. Called before the forward."""
        self._armed = sync

    def _watch_gradients(self, parameters: Sequence[Parameter]) -> Callable[[bool], None]:
        """Reduce the gradients of ``parameters`` in every armed backward from now on.

        Returns:
            What ends a step's reduction: afterwards each ``grad`` holds the reduced gradient, or None where no rank
            had one. Its argument says that some gradients came from a backward which the engine, to be armed before
            the forward, may have missed.
        """
        reducer = GradientReducer(
            parameters,
            all_reduce=self._all_reduce,
            armed=lambda: self._armed,
            name=f"gradients.{len(self._reducers)}",
            wire_dtype=AUTOCAST_DTYPE.get(self.config.compression),
            overlap=self.matches_by_name or not self.config.sync_batchnorm,
        )
        self._reducers.append(reducer)
        return lambda late: reducer.finish()

    def _check_world(self) -> None:
        said = (self.launch.rank, self.expected_world(self.launch))
        if (self.rank, self.world_size) != said:
            self._close()
            raise LaunchError(
                f"{self.launch.launcher} says that this is rank {said[0]} of {said[1]}, but backend {self.name} sees "
                f"rank {self.rank} of {self.world_size}. Evidence: {', '.join(self.launch.evidence) or 'none'}."
            )

    def _meet(self) -> None:
        """Compare notes with the other ranks, and let the processes watch over one another from now on."""
        try:
            members = introduce(self)
            self.watch = Watch(self, members)
        except UnitrainError:
            self._close()
            raise
        if self.launch.node_rank is None:  # the launcher does not tell: hosts are numbered in the order of the ranks
            hosts = [member.host for member in members]
            self.node_rank = list(dict.fromkeys(hosts)).index(hosts[self.rank])

    # --------------------------------------------------------------------------------------------------- training

    @overload
    def prepare(self, one: T, /) -> T: ...

    @overload
    def prepare(self, first: Any, second: Any, /, *more: Any) -> tuple[Any, ...]: ...

    def prepare(self, *objects: Any) -> Any:
        """Make modules, optimizers and schedulers ready for this run, and return them in the order given.

        A module is moved to the device, its BatchNorm is converted (with ``sync_batchnorm``), rank 0's weights and
        buffers are copied to all ranks, its forward enters autocast, and it is wrapped where the backend wraps.
        Parameters stay the same objects, and an optimizer is returned as it was given, with rank 0's state: loaded
        state and schedulers made before stay valid. A module may be prepared before its optimizer exists.

        Raises:
            UsageError: something else was given, or it was prepared before.
            CommunicationError: the ranks' models differ in names, shapes or dtypes.
        """
        prepared = self._preparation.prepare(objects)
        return prepared[0] if len(objects) == 1 else prepared

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context to compute a loss in. A prepared model's forward enters it by itself."""
        return self.precision.autocast()

    def step(
        self,
        loss: Tensor,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Any = None,
        *,
        weight: Weight | None = None,
    ) -> StepResult:
        """Do all that follows a loss: backward, average, unscale, clip, check, step, zero the gradients.

        Within an accumulation window only backward runs; the optimizer (and the scheduler) moves at its end. The
        gradient is that of the mean over all samples of the window on all ranks.

        Args:
            loss: scalar, the mean over this rank's samples of the batch.
            optimizer: what to step; several share the one loss.
            scheduler: stepped when the optimizer is.
            weight: what this rank's mean counts for: the number of its tokens, say. Default: the number of samples
                of the batch that the strategy's loader handed out last; without such a loader all ranks are equal.

        Raises:
            UsageError: the loss is no scalar with a gradient, or a micro-batch was left out.
            NonFiniteError: a loss or gradient is not finite, under ``on_nonfinite="raise"``.
            Stopped: the same under ``on_nonfinite="stop"``.
        """
        if isinstance(optimizer, Optimizer):
            self._training_step.backward(loss, [optimizer], weight=weight)
            return self._training_step.update(optimizer, scheduler)
        if not isinstance(optimizer, Sequence) or not optimizer:
            raise UsageError(
                f"step() needs an optimizer of torch, or a list of at least one, not {type(optimizer).__name__}."
            )
        self._training_step.backward(loss, optimizer, weight=weight)
        results = [self._training_step.update(one) for one in optimizer]
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
        """The first half of ``step``: for several losses on one optimizer, or several optimizers.

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
        self._training_step.backward(loss, None if optimizer is None else [optimizer], sync=sync, weight=weight)

    def update(self, optimizer: Optimizer, scheduler: Any = None) -> StepResult:
        """The second half of ``step``, once for each micro-batch and optimizer."""
        return self._training_step.update(optimizer, scheduler)

    def dataloader(self, dataset: Any, **settings: Any) -> Loader:
        """Return a loader of this rank's share of ``dataset``; see ``unitrain.data.Loader`` for its settings."""
        return Loader(self, dataset, **settings)

    def progress(self, loader: Loader, description: str = "") -> ProgressBar:
        """Return what iterates over ``loader`` and shows samples a second and the time left on rank 0's terminal."""
        from unitrain.data.progress import ProgressBar  # it imports rich, which few scripts want

        return ProgressBar(self, loader, description)

    def meter(self) -> Meter:
        """Return a sum and mean over all ranks that is reduced only when it is read."""
        return Meter(self)

    def throughput(self) -> Throughput:
        """Return what measures samples a second, the split of the time and peak memory, from the first call on."""
        if self._throughput is None:
            self._throughput = Throughput(self)
        return self._throughput

    def metric(self, metric: T) -> T:
        """Let a torchmetrics ``Metric`` synchronise through this strategy, on any backend; it is returned as it is."""
        return meter.synchronise(metric, self)

    def check_in_sync(self, module: nn.Module) -> None:
        """Compare a model's parameters and buffers over the ranks, by checksums of their bits. Collective.

        The running statistics of BatchNorm layers that are not synchronised are each rank's own, and left out.

        Raises:
            CommunicationError: on every rank, naming the first tensor that differs and the ranks where it does.
        """
        check_in_sync(self, self.unwrap(module))

    @contextmanager
    def evaluation(self, *modules: nn.Module) -> Iterator[None]:
        """Evaluate: eval mode, no gradients, and BatchNorm statistics that all ranks agree on. Collective.

        Running statistics of layers that are not synchronised are averaged over the ranks first. Afterwards every
        layer is in the mode it was in.
        """
        if not modules:
            raise UsageError("evaluation() needs the model, or models, to be evaluated.")
        modes = [(layer, layer.training) for module in modules for layer in module.modules()]
        batch_norm.average_statistics(modules, self)
        outer, self.evaluating = self.evaluating, True
        try:
            for module in modules:
                module.eval()
            with torch.no_grad():
                yield
        finally:
            self.evaluating = outer
            for layer, training in modes:
                layer.training = training

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

    def save(self, value: Any, path: str | Path) -> None:
        """Write ``value`` once, from rank 0, so that a reader sees the old file or the whole new one. Collective.

        Modules, optimizers and schedulers inside dicts and lists are saved as their state, without wrappers' prefixes.
        BatchNorm's running statistics that are not synchronised are averaged over the ranks first.

        Raises:
            CheckpointError: rank 0 could not write, or ``load`` could not read it; raised on every rank.
            UsageError: only some ranks gave modules.
        """
        files.save(self, value, Path(path))

    def load(self, path: str | Path) -> Any:
        """Read what ``save`` wrote, on rank 0, and return it on every rank, on the CPU. Collective.

        Raises:
            CheckpointError: there is no such file, or it holds more than tensors and plain data; on every rank.
        """
        return files.load(self, Path(path))

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
            self, Path(folder), objects, config=config or {}, keep=keep, background=background
        )
        # Without a checkpoint there is nothing to save, and a signal does at once what it does to any program.
        self.stopping.listen()
        return self._checkpoint

    @property
    def open_checkpoint(self) -> Checkpoint | None:
        """What ``checkpoint`` returned, until it is closed."""
        return self._checkpoint

    def release_checkpoint(self) -> None:
        """Take note that the checkpoint was closed."""
        self._checkpoint = None
        self.stopping.close()

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's own module behind what ``prepare`` or ``torch.compile`` returned."""
        return self._preparation.unwrap(module)

    def export(self, module: nn.Module) -> nn.Module:
        """Return a plain copy on the CPU, in eval mode: no wrapper, no hook of ours, BatchNorm as it was."""
        return self._preparation.export(module)

    def check_all_in_sync(self) -> None:
        """``check_in_sync`` of every prepared module."""
        for module in self._preparation.modules():
            check_in_sync(self, self.unwrap(module))

    def check_prepared(self, parameters: Sequence[Parameter]) -> None:
        """Raise UsageError where an optimizer holds parameters of a module that was never prepared."""
        self._preparation.check(parameters)

    def is_prepared(self, parameter: Parameter) -> bool:
        """Whether a parameter is one of a prepared module."""
        return self._preparation.knows(parameter)

    def parameter_name(self, parameter: Parameter) -> str:
        """Return a prepared parameter's name."""
        return self._preparation.name(parameter)

    # -------------------------------------------------------------------------------------------------- life time

    @property
    def steps(self) -> int:
        """Optimizer steps that the run has made, those before it was resumed included."""
        return self._training_step.steps

    def close(self) -> None:
        """End communication. Waits for the other ranks, unless this process is failing. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        try:
            if not self.failed:  # a failing process keeps its watch, to say why it fails
                with self.pulse.within(CLOSING):
                    if self._checkpoint is not None:
                        self._checkpoint.close()
                    self.barrier()
                if self.watch is not None:
                    self.watch.close()
        finally:
            self.stopping.close()
            self._training_step.close()
            for reducer in self._reducers:
                reducer.close()
            self._preparation.release()
            self.closed = True
            self._close()

    def __enter__(self) -> Strategy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.failed = self.failed or kind is not None
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """A copied model (an average of its weights, say) shares its strategy."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError("a strategy can't be pickled: save a model's state with strategy.save, or strategy.export it.")
