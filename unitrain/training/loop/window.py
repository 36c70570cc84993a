"""The accumulation window: the state of an optimizer's backwards since its last step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.backend import Backend
from unitrain.data.order.sharding import MicroBatch
from unitrain.errors import UsageError
from unitrain.training.gradients.local_gradients import LocalGradients


class Window:
    """The accumulation window of one optimizer.

    Args:
        optimizer: the optimizer whose gradients are accumulated.
        name: unique among optimizers, and the same on all ranks.
        local_gradients: keeps local gradients of this rank.
        backend: has the leaves of the graph for parameters, and their gradients.

    Attributes:
        leaf: returns the leaf of the graph for a parameter.
    """

    __slots__ = (
        "complete", "drop_gradients", "finishers", "fresh", "groups", "late", "leaf", "local_gradients", "looked_at",
        "loss_is_finite", "losses", "micro_batch", "micro_batches", "name", "optimizer", "parameters", "reduced",
        "total_wait", "trained", "weight", "witness",
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
        self.weight: Tensor | None = None
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
        """Check that the gradients are those of the last backward.

        Functions like ``zero_grad`` and ``clip_grad_norm_`` change all gradients, so that looking at one is enough.

        Raises:
            UsageError: they were changed or cleared.
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
        """Check that a micro-batch follows the previous one.

        Raises:
            UsageError: it was passed twice, or one was left out.
        """
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
