"""Accumulation windows: the parameters that each optimizer trains, and the backwards since its last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.sharding import Sharding
from unitrain.data.order.sharding import MicroBatch
from unitrain.device import by_device
from unitrain.errors import UsageError
from unitrain.training.gradients.evidence import Evidence
from unitrain.training.windows.weights import Total, Weight


@dataclass(eq=False, slots=True)
class Shared:
    """The parameters that the optimizer of a window shares with others.

    Attributes:
        rivals: windows of optimizers that train some of the same parameters, and these.
        partners: those of them that share the losses of this window.
        aside: gradients of shared parameters, while these have gradients of another window.
    """

    rivals: dict[Window, list[Parameter]] = field(default_factory=dict)
    partners: set[Window] = field(default_factory=set)
    aside: dict[Tensor, Tensor | None] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Window:
    """The accumulation window of one optimizer: its parameters, and the micro-batches since its last step.

    Only its methods write to it.

    Attributes:
        reference: to the optimizer, which is freed when the script drops it.
        name: its name in messages and collectives, unique among optimizers, and the same on all ranks.
        evidence: records which losses and gradients are finite.
        total: the sum of the weights of the losses.
        sharding: drops the gradients of parameters.
        trial: the trial that the optimizer is of; "" outside of trials.
        parameters: of the optimizer.
        trained: those that require gradients.
        micro_batch: of the last backward; None without a loader.
        micro_batches: number of those completed by ``update``.
        last: whether the last backward ends the window; None if the current micro-batch had none yet.
        witness: a gradient, its parameter and its version, to notice changes.
        shared: what it shares with other windows.
    """

    reference: ref[Optimizer]
    name: str
    evidence: Evidence
    total: Total
    sharding: Sharding
    trial: str = ""
    parameters: list[Parameter] = field(default_factory=list)
    trained: list[Parameter] = field(default_factory=list)
    micro_batch: MicroBatch | None = None
    micro_batches: int = 0
    last: bool | None = None
    witness: tuple[Parameter, Tensor, int] | None = None
    shared: Shared = field(default_factory=Shared)

    def watch(self, parameters: list[Parameter], trained: list[Parameter]) -> None:
        """Accumulate for these parameters of the optimizer from now on.

        Args:
            parameters: all of the optimizer's.
            trained: those that require gradients.
        """
        self.parameters = parameters
        known = set(map(id, self.trained))
        # A backward for another optimizer may have left gradients of parameters that this one trains only now.
        self.sharding.drop_gradients([p for p in trained if id(p) not in known])
        self.trained = trained

    def clear(self) -> None:
        """Drop everything that was accumulated, including gradients, and start a new window."""
        for parameter in self.parameters:  # a call in each step would cost more
            parameter.grad = None
        if self.sharding.of_parameters:
            self.sharding.drop_gradients(self.parameters)
        if not self.evidence.is_empty:
            self.evidence.clear()
        if self.total.weight is not None:
            self.total.clear()
        self.micro_batches = 0
        self.micro_batch = self.last = self.witness = None
        if self.shared.rivals:
            self.shared.aside.clear()

    @property
    def is_open(self) -> bool:
        """Whether something was accumulated."""
        return self.micro_batches > 0 or self.last is not None

    def enter(self, micro_batch: MicroBatch | None, weight: Weight | None, last: bool) -> None:
        """Add a loss of a micro-batch, which ends the window if ``last``. Its backward follows.

        Args:
            micro_batch: None without a loader.
            weight: that the script gives; several as a vector, or None.
            last: whether the backward ends the window.

        Raises:
            UsageError: the micro-batch does not follow the previous one, or was weighed in another way.
        """
        if micro_batch is not None and self.last is None:
            self._check_order(micro_batch)
        if self.micro_batches or self.last is not None:
            if (weight is None) != (self.total.weight is None):
                raise UsageError("pass weight= to every backward of an accumulation window, or to none.")
            if self.total.weight is not None and self.total.weight.shape != getattr(weight, "shape", ()):
                raise UsageError("pass the same losses to every backward of an accumulation window.")
        self.micro_batch = micro_batch
        if weight is not None and self.last is None:
            self.total.add(weight, last=last)

    def leave(self, last: bool) -> None:
        """Record that the backward has ended."""
        self.last = last
        if not last:
            self.remember_gradients()

    def advance(self) -> None:
        """Complete a micro-batch that does not end the window."""
        self.micro_batches += 1
        self.last = None  # the next micro-batch has had no backward yet

    def rescale(self, gradients: list[Tensor]) -> None:
        """Turn the sum of gradients into the gradients of the window's mean loss, if its shares were not known.

        Args:
            gradients: of the parameters, averaged over the ranks; changed in place.
        """
        factor = self.total.shares(1.0)
        if factor.dim():
            return  # the backward knew the total
        for dtype in {gradient.dtype for gradient in gradients}:
            for together in by_device(g for g in gradients if g.dtype == dtype):
                torch._foreach_mul_(together, factor.to(together[0].device, dtype))

    @torch.no_grad()
    def set_aside(self, number: int) -> None:
        """Take the gradients of the last backward from the parameters, and add them to those of its loss.

        Args:
            number: of the loss, among several with weights of their own.
        """
        kept = self.total.kept.setdefault(number, {})
        for parameter in self.parameters:
            leaf = self.evidence.leaf(parameter)
            if leaf.grad is not None:
                kept[parameter] = kept[parameter].add_(leaf.grad) if parameter in kept else leaf.grad
                leaf.grad = None

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the parameters the sum of the gradients that were set aside, each times the share of its loss."""
        factors = self.total.shares(1.0)
        for number, kept in self.total.kept.items():
            for parameter, gradient in kept.items():
                leaf = self.evidence.leaf(parameter)
                part = gradient * factors[number - 1].to(gradient.device)
                leaf.grad = part if leaf.grad is None else leaf.grad + part
        self.total.kept.clear()

    @torch.no_grad()
    def keep(self, parameters: Sequence[Parameter]) -> bool:
        """Keep copies of these parameters' gradients, unless that was done. Return whether they were of this window."""
        tensors = {tensor for p in parameters for tensor in (p, self.evidence.leaf(p))} - self.shared.aside.keys()
        for tensor in tensors:
            self.shared.aside[tensor] = None if tensor.grad is None else tensor.grad.clone()
        self.witness = None
        return bool(tensors)

    def restore(self) -> None:
        """Give the parameters the gradients that were kept."""
        for tensor, gradient in self.shared.aside.items():
            tensor.grad = gradient
        self.shared.aside.clear()

    def remember_gradients(self) -> None:
        """Remember a gradient and its version, to notice changes that the script makes before the step."""
        for p in self.trained or self.parameters:
            gradient = p.grad
            if gradient is not None:  # torch counts the changes of a tensor in place in its version
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
        raise UsageError(
            f"the gradients of {self.name} were changed or cleared since the last backward, when they are not complete "
            "yet: remove zero_grad() from the loop, since step() clears them at the end of each accumulation window, "
            "clip with the setting clip_norm, and change gradients in a step pre-hook of the optimizer "
            "(optimizer.register_step_pre_hook)."
        )

    def _check_order(self, micro_batch: MicroBatch) -> None:
        """Raise UsageError if a micro-batch is the previous one again, or one between them was left out."""
        previous = self.micro_batch
        if previous is micro_batch:
            raise UsageError(
                "step() was called twice for one micro-batch of an accumulation window: add the losses, or use "
                "backward() and update()."
            )
        if self.micro_batches > 0 and micro_batch.opening:
            self.clear()  # the previous iteration ended early, within a window
            previous = None
        follows = micro_batch.first if previous is None else micro_batch.start == previous.stop
        if not follows or (previous is None and self.micro_batches > 0):
            # Its samples would count as trained on, and the shares of the others would not add up to 1.
            raise UsageError(
                f"step() was not called for a micro-batch before this one (step {micro_batch.step} of the epoch): call "
                "it for every batch that the loader yields. To leave a batch out, multiply its loss by 0."
            )
