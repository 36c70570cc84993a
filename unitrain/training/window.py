"""The accumulation window: what an optimizer's backwards have gathered since its last step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.data.sharding import MicroBatch
from unitrain.training.nonfinite import LocalGradients


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
