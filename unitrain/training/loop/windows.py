"""The accumulation windows of all optimizers, and the parameters that each of them trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import TYPE_CHECKING

from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.errors import UsageError
from unitrain.training.gradients.guard import GuardedStep
from unitrain.training.gradients.local_gradients import LocalGradients
from unitrain.training.gradients.reduction import Reduction
from unitrain.training.loop.window import Window
from unitrain.training.models.prepared import PreparedModules

if TYPE_CHECKING:
    from unitrain.training.optimizers.sharded import ShardedOptimizers


class Windows:
    """Makes a window for each optimizer, and keeps its parameters up to date when the script changes them.

    Iterating yields the windows, in the order in which their optimizers were registered.

    Args:
        communicator: the communicator of this process.
        backend: has the leaves of the graph for parameters, and their gradients.
        prepared: the prepared modules.
        reduction: averages the gradients of the parameters.
        guard: is told whether torch's kernel may be given all gradients at once.
        debug: keep the local gradients of all parameters, to name those that are not finite.
        sharded: shards optimizers, with ``shard_optimizer``.
        begun: called with a new window.
    """

    def __init__(
        self,
        communicator: Communicator,
        backend: Backend,
        prepared: PreparedModules,
        reduction: Reduction,
        guard: GuardedStep,
        *,
        debug: bool,
        sharded: ShardedOptimizers | None,
        begun: Callable[[Window], None],
    ) -> None:
        self._device = communicator.device
        self._distributed = communicator.world_size > 1
        self._backend = backend
        self._prepared = prepared
        self._reduction = reduction
        self._guard = guard
        self._sharded = sharded
        self._debug = debug
        self._begun = begun
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
        """Return the window of an optimizer, a new one if there was none.

        Raises:
            UsageError: it is not a torch optimizer.
        """
        window = self._windows.get(optimizer)
        if window is None:
            if not isinstance(optimizer, Optimizer):
                raise UsageError(f"step() and backward() take torch optimizers, not {type(optimizer).__name__}.")
            if self._sharded is not None:
                self._sharded.shard(optimizer)
            local = LocalGradients(all_of_them=self._debug, leaf=self._backend.leaf)
            name = f"optimizer {len(self._windows)}"
            window = self._windows[optimizer] = Window(optimizer, name, local, self._backend)
            self._begun(window)
        return window

    def of(self, optimizers: Sequence[Optimizer] | None) -> list[Window]:
        """Return the windows of optimizers, with their parameters of now. None means all that are registered.

        Raises:
            UsageError: none is, or one is not a torch optimizer.
        """
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

    def close(self) -> None:
        """Remove the hooks of all windows."""
        for window in self._windows.values():
            window.local_gradients.close()
