"""The accumulation windows: the state of each optimizer's backwards since its last step, and what it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.data.order.sharding import MicroBatch
from unitrain.errors import UsageError
from unitrain.training.gradients.guard import GuardedStep
from unitrain.training.gradients.local_gradients import LocalGradients
from unitrain.training.gradients.reduction import Reduction
from unitrain.training.models.prepared import PreparedModules

if TYPE_CHECKING:
    from unitrain.training.optimizers.sharded import ShardedOptimizers


class Window:
    """The accumulation window of one optimizer.

    Its name is unique among optimizers, and the same on all ranks. ``leaf`` returns the leaf of the graph for a
    parameter.
    """

    __slots__ = (
        "complete", "drop_gradients", "finishers", "fresh", "groups", "kept", "late", "leaf", "local_gradients",
        "looked_at", "loss_is_finite", "losses", "micro_batch", "micro_batches", "name", "optimizer", "parameters",
        "reduced", "total_wait", "trained", "weight", "witness",
    )  # fmt: skip

    def __init__(self, optimizer: Optimizer, name: str, local_gradients: LocalGradients, backend: Backend) -> None:
        self.leaf: Callable[[Parameter], Tensor] = backend.leaf
        self.drop_gradients: Callable[[Sequence[Parameter]], None] = backend.drop_gradients
        self.optimizer: Optimizer = optimizer
        self.name: str = name
        self.local_gradients: LocalGradients = local_gradients
        self.groups: int = 0  # number of parameter groups
        self.looked_at: bool = False  # the graph of a loss, for what does not work with several optimizers
        self.parameters: list[Parameter] = []
        self.trained: list[Parameter] = []
        self.finishers: list[Callable[[bool], None]] = []
        self.clear()

    def clear(self) -> None:
        """Drop everything that was accumulated, including gradients, and start a new window."""
        self.drop_gradients(self.parameters)
        self.local_gradients.clear()
        self.micro_batch: MicroBatch | None = None  # of the last backward
        self.micro_batches: int = 0  # completed by update()
        self.fresh: bool = True  # no backward yet for the current micro-batch
        self.loss_is_finite: bool = True
        self.losses: list[Tensor] = []  # on a GPU, where reading them would wait for it
        self.complete: bool = False  # the last backward ended the window
        self.reduced: bool = False  # its gradients are being reduced, or have been
        # A library that must be armed before the forward can't have reduced some of them.
        self.late: bool = False
        self.weight: Tensor | None = None  # of the losses so far; a vector if they have separate weights
        self.kept: dict[int, dict[Parameter, Tensor]] = {}  # by the number of a loss: gradients that are not in grad
        self.total_wait: Callable[[], None] | None = None
        self.witness: tuple[Parameter, Tensor, int] | None = None

    def remember_gradients(self) -> None:
        """Remember a gradient and its version, to notice changes that the script makes before the step."""
        for p in self.trained or self.parameters:
            gradient = p.grad
            if gradient is not None:
                self.witness = p, gradient, gradient._version
                return

    def check_gradients(self) -> None:
        """Raise UsageError if the gradients were changed or cleared since the last backward.

        Functions like ``zero_grad`` and ``clip_grad_norm_`` change all gradients, so that looking at one is enough.
        """
        if self.witness is None:
            return
        parameter, gradient, version = self.witness
        self.witness = None
        # DDP may have moved the gradient into one of its buckets.
        if parameter.grad is not None and (parameter.grad is not gradient or gradient._version == version):
            return
        if self.fresh:
            raise UsageError(
                f"the gradients of {self.name} were changed or cleared after micro-batch {self.micro_batches} of an "
                "accumulation window: remove zero_grad() from the loop, since step() clears the gradients at the end "
                "of each window, and clip with the settings clip_norm and clip_value."
            )
        raise UsageError(
            f"the gradients of {self.name} were changed between backward() and update(), when they are not averaged "
            "over the ranks yet: clip with the settings clip_norm and clip_value, and change gradients in a step "
            "pre-hook of the optimizer (optimizer.register_step_pre_hook)."
        )

    def check_order(self, micro_batch: MicroBatch) -> None:
        """Raise UsageError if a micro-batch is the previous one again, or one between them was left out."""
        before = self.micro_batch
        if before is micro_batch:
            raise UsageError(
                "step() was called twice for one micro-batch of an accumulation window: add the losses, or use "
                "backward() and update()."
            )
        if self.micro_batches > 0 and micro_batch.opening:
            self.clear()  # the previous iteration ended early, within a window
            before = None
        follows = micro_batch.first if before is None else micro_batch.start == before.stop
        if not follows or (before is None and self.micro_batches > 0):
            raise UsageError(
                f"step() was not called for a micro-batch before this one (step {micro_batch.step} of the epoch): call "
                "it for every batch that the loader yields. To leave a batch out, multiply its loss by 0."
            )


class Windows:
    """Makes a window for each optimizer, and keeps its parameters up to date when the script changes them.

    Iterating yields the windows, in the order in which their optimizers were registered.
    """

    def __init__(
        self,
        communicator: Communicator,
        backend: Backend,
        prepared: PreparedModules,
        reduction: Reduction,
        guard: GuardedStep,
        sharded: ShardedOptimizers | None,
        config: StrategyConfig,
    ) -> None:
        self._device = communicator.device
        self._distributed = communicator.world_size > 1 and config.local_steps == 1
        self._backend = backend
        self._prepared = prepared
        self._reduction = reduction
        self._guard = guard
        self._sharded = sharded
        self._debug = config.debug
        self._windows: dict[Optimizer, Window] = {}

    def __iter__(self) -> Iterator[Window]:
        return iter(self._windows.values())

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def any_open(self) -> bool:
        """Whether an optimizer has gradients of a window that is not complete."""
        return any(window.micro_batches > 0 or not window.fresh for window in self._windows.values())

    def get(self, optimizer: Optimizer) -> Window | None:
        """Return the window of an optimizer, or None if it was not registered."""
        return self._windows.get(optimizer)

    def register(self, optimizer: Optimizer) -> Window:
        """Return the window of an optimizer, a new one if there was none."""
        window = self._windows.get(optimizer)
        if window is None:
            if not isinstance(optimizer, Optimizer):
                raise UsageError(f"step() and backward() take torch optimizers, not {type(optimizer).__name__}.")
            if self._sharded is not None:
                self._sharded.shard(optimizer)
            local = LocalGradients(all_of_them=self._debug, leaf=self._backend.leaf)
            name = f"optimizer {len(self._windows)}"
            window = self._windows[optimizer] = Window(optimizer, name, local, self._backend)
        return window

    def of(self, optimizers: Sequence[Optimizer] | None) -> list[Window]:
        """Return the windows of optimizers, with their parameters of now. None means all that are registered."""
        if optimizers is None:
            if not self._windows:
                raise UsageError(
                    "backward() was called without an optimizer, and none was prepared: pass one to either."
                )
            return [self._watched(window) for window in self._windows.values()]
        windows = []
        for optimizer in optimizers:
            window = self._windows.get(optimizer)
            windows.append(self._watched(self.register(optimizer) if window is None else window))
        return windows

    def _watched(self, window: Window) -> Window:
        """Update the window's parameters after changes of the optimizer's groups, or of ``requires_grad``.

        With a single optimizer in one process, frozen parameters need not be excluded: they have no gradient.
        """
        if not self._distributed and len(self._windows) == 1 and len(window.optimizer.param_groups) == window.groups:
            return window
        trained = [p for group in window.optimizer.param_groups for p in group["params"] if p.requires_grad]
        if len(trained) != len(window.trained) or not all(map(is_, trained, window.trained)):
            self._watch(window, trained)
        return window

    def _watch(self, window: Window, trained: list[Parameter]) -> None:
        window.groups = len(window.optimizer.param_groups)
        window.parameters = [p for group in window.optimizer.param_groups for p in group["params"]]
        self._prepared.check(window.parameters)
        # A kernel on another GPU than its flag's would write to memory that it may not have.
        self._guard.all_plain &= all(p.device == self._device for p in window.parameters)
        if self._sharded is not None:
            self._sharded.shard(window.optimizer)
        before = set(map(id, window.trained))
        # Left by a backward for another optimizer.
        window.drop_gradients([p for p in trained if id(p) not in before])
        if self._distributed:
            window.local_gradients.watch(trained)
            window.finishers = self._reduction.finishers(trained)
        window.trained = trained  # last: if there is no memory for buckets, the next call makes them

    def abandon(self, window: Window) -> None:
        """Give an optimizer the model's parameters back, if its step has raised an error."""
        if self._sharded is not None:
            self._sharded.abandon(window.optimizer)

    def close(self) -> None:
        """Remove the hooks of all windows."""
        for window in self._windows.values():
            window.local_gradients.close()
