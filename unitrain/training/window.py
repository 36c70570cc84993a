"""The accumulation window: what an optimizer's backwards have gathered since its last step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.data.sharding import MicroBatch
from unitrain.errors import UsageError
from unitrain.training.local_gradients import LocalGradients


class Window:
    """The accumulation window of one optimizer.

    Args:
        optimizer: whose gradients are gathered.
        name: the same on all ranks, and no other optimizer's.
        local_gradients: what remembers this rank's share of them.
    """

    __slots__ = (
        "complete", "finishers", "fresh", "groups", "late", "local_gradients", "loss_is_finite", "losses",
        "micro_batch", "micro_batches", "name", "optimizer", "parameters", "reduced", "total_wait", "trained", "weight",
    )  # fmt: skip

    def __init__(self, optimizer: Optimizer, name: str, local_gradients: LocalGradients) -> None:
        self.optimizer: Optimizer = optimizer
        self.name: str = name
        self.local_gradients: LocalGradients = local_gradients
        self.groups: int = 0  # how many parameter groups the parameters are of
        self.parameters: list[Parameter] = []
        self.trained: list[Parameter] = []
        self.finishers: list[Callable[[bool], None]] = []
        self.clear()

    def clear(self) -> None:
        """Give up what was gathered, gradients included, and begin anew."""
        for p in self.parameters:
            p.grad = None
        self.local_gradients.clear()
        self.micro_batch: MicroBatch | None = None  # of the last backward
        self.micro_batches: int = 0  # those that update() has closed
        self.fresh: bool = True  # no backward yet for the micro-batch that is open
        self.loss_is_finite: bool = True
        self.losses: list[Tensor] = []  # where to look would be to wait for a GPU
        self.complete: bool = False  # the last backward ended the window
        self.reduced: bool = False  # its gradients are being reduced, or have been
        # Some of them can't have been reduced by an engine that must be armed before the forward.
        self.late: bool = False
        self.weight: Tensor | None = None
        self.total_wait: Callable[[], None] | None = None

    def check_order(self, micro_batch: MicroBatch) -> None:
        """Take the first backward of a micro-batch, which must follow the one before.

        Raises:
            UsageError: it comes twice, or one was left out.
        """
        before = self.micro_batch
        if before is micro_batch:
            raise UsageError("step() was called twice for one micro-batch of an accumulation window.")
        if self.micro_batches > 0 and micro_batch.opening:
            self.clear()  # the iteration before was broken off within a window
            before = None
        follows = micro_batch.first if before is None else micro_batch.start == before.stop
        if not follows or (before is None and self.micro_batches > 0):
            raise UsageError(
                f"a micro-batch before this one, of step {micro_batch.step} of the epoch, was never given to step(): "
                "every batch that the loader yields needs one (a loss times 0 leaves a batch out)."
            )
