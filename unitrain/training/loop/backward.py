"""Runs the backward of losses so that a non-finite loss shows up in the averaged gradients of all ranks.

This needs no other collective. A loss of weight 0 has no effect on the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.autograd import backward

from unitrain.data.order.sharding import MicroBatch
from unitrain.errors import UsageError
from unitrain.training.loop.parts import run_parts
from unitrain.training.windows.weights import Losses, LossScale, Weight, Weights
from unitrain.training.windows.window import Window

# By a part of torch's error, which says what autograd lacks, but not which line of the script is wrong.
_CAUSES = {
    "backward through the graph a second time": (
        "backward was already called on this loss: step() calls it itself, so remove loss.backward(). Add losses that "
        "share a part of the graph, and pass their sum to step()."
    ),
    "storage of size 0": (
        "the backward needs weights that a sharded model has freed. If the loss has a gradient of the model in it "
        "(torch.autograd.grad with create_graph=True, as gradient penalties do), keep them until the step: set "
        "fsdp.reshard_after_backward to false. If a layer keeps tensors that the loss uses without returning them, "
        "keep the weights from the forward on: set fsdp.reshard_after_forward to false."
    ),
    "with sparse tensors": (  # NCCL's
        "a parameter has sparse gradients, which this communication library can't average: create its layer with "
        "sparse=False."
    ),
}


class Backward:
    """Differentiates the losses of a micro-batch, and records in its windows whether they are finite.

    On a GPU, the host does not know that yet: if a loss is non-finite, the device adds NaN to a gradient.

    Args:
        weights: weighs several losses.
        scale: makes the gradient that a backward starts from.
        device: of the losses. On the CPU, reading one costs nothing.
    """

    def __init__(self, weights: Weights, scale: LossScale, device: torch.device) -> None:
        self._weights = weights
        self._scale = scale
        self._on_host = device.type == "cpu"
        self._searched: set[str] = set()  # windows: a graph of theirs was, for reentrant checkpointing

    def run(
        self, losses: Losses, micro_batch: MicroBatch | None, windows: list[Window], last: bool, of_all: bool
    ) -> None:
        """Run the backward.

        Args:
            losses: the losses. Unless the script gave weights, a loss has its share in the mean of the window.
            micro_batch: that they are of; None without a loader.
            windows: of the optimizers whose parameters get gradients.
            last: whether this backward ends the windows.
            of_all: whether these are the windows of all optimizers, so that all leaves of the graph get gradients.

        Raises:
            UsageError: the backward fails in a way that a script can mend, or the graph can't be limited to leaves.
        """
        # Not limited in the usual case, where all leaves of the graph belong to these windows anyway.
        inputs = None if of_all else self._leaves(losses, windows)
        try:
            if len(losses.each) > 1:
                run_parts(losses, windows, self._weights, self._scale, partial(self._run, windows, inputs), last=last)
                return
            loss, weights, start = losses.each[0], self._weights, None
            if losses.weights:
                weight = losses.weights[0]
            elif micro_batch is None:
                weight = weights.uncounted
            else:
                weight = micro_batch.count * weights.of_sample / micro_batch.window
            if losses.weights or weight != 1.0 or self._scale.scaler is not None:
                start = self._scale.start(loss, weight)  # otherwise autograd itself starts from 1
            if self._on_host and not losses.weights and weight and math.isfinite(loss.item()):
                backward(loss, start, inputs=inputs)  # the usual case, without a call
            else:
                self._run(windows, inputs, loss, start, weight)
        except RuntimeError as error:
            for part, message in _CAUSES.items():
                if part in str(error):
                    raise UsageError(message) from error
            raise

    def _leaves(self, losses: Losses, windows: list[Window]) -> list[Tensor]:
        """Return the leaves of the graph that a backward for some of the optimizers is limited to.

        Raises:
            UsageError: the graph has reentrant checkpointing, which can't be limited.
        """
        names = [window.name for window in windows]
        if not self._searched.issuperset(names):
            for loss in losses.each:
                _refuse_reentrant_checkpointing(loss)
            self._searched.update(names)
        return [window.evidence.leaf(p) for window in windows for p in window.trained]

    def _run(
        self,
        windows: Sequence[Window],
        inputs: Sequence[Tensor] | None,
        loss: Tensor,
        start: Tensor | None,
        weight: Weight,
        keep_graph: bool = False,
    ) -> None:
        """Run the backward of one loss, such that its gradients show whether it is finite.

        Args:
            windows: record the loss.
            inputs: leaves that get gradients; None for all.
            loss: a scalar that requires grad.
            start: the gradient that the backward starts from; None for 1.
            weight: of the loss; with 0, it has no effect, even if it is NaN.
            keep_graph: whether another backward goes through the same graph.
        """
        if isinstance(weight, Tensor):
            if not weight.is_cpu:  # the host does not wait to read it, so the device decides about zeros
                with _replaced(windows, partial(_zero_unless_weighted, weight=weight)):
                    self._run_unread(windows, inputs, loss, start, keep_graph)
                return
            weight = weight.item()
        if weight and self._on_host and math.isfinite(loss.item()):  # the usual case
            backward(loss, start, keep_graph, inputs=inputs)
        elif not weight:
            # Zeros instead of a product with 0, which would be NaN for a loss of NaN.
            with _replaced(windows, torch.zeros_like):
                backward(loss, start, keep_graph, inputs=inputs)
        elif not self._on_host:
            self._run_unread(windows, inputs, loss, start, keep_graph)
        else:
            # The gradient alone may not show it: if all labels are ignored, the loss is NaN and its gradient 0.
            for window in windows:
                window.evidence.refuse_loss()
            with _replaced(windows, partial(torch.full_like, fill_value=math.nan)):
                backward(loss, start, keep_graph, inputs=inputs)

    def _run_unread(
        self,
        windows: Sequence[Window],
        inputs: Sequence[Tensor] | None,
        loss: Tensor,
        start: Tensor | None,
        keep_graph: bool,
    ) -> None:
        """Run the backward of a loss on a GPU, which the host does not wait for."""
        weighed = loss.detach() if start is None else torch.where(start == 0, 0.0, loss.detach())
        for window in windows:
            window.evidence.add_loss(weighed)
        backward(loss, start, keep_graph, inputs=inputs)


@contextmanager
def _replaced(windows: Sequence[Window], make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace every gradient of a backward in the block by ``make`` of it, before it is accumulated and averaged.

    Hooks of leaves do this, so that gradients still arrive: buckets and DDP wait for each of them.
    """
    with ExitStack() as stack:
        for window in windows:
            stack.enter_context(window.evidence.paused())
            for p in window.parameters:
                if p.requires_grad:
                    stack.enter_context(window.evidence.leaf(p).register_hook(make))  # type: ignore[no-untyped-call]
        yield


def _zero_unless_weighted(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return zeros if the weight is 0: a product with it would keep NaN."""
    return torch.where(weight.to(gradient.device) == 0, torch.zeros_like(gradient), gradient)


def _refuse_reentrant_checkpointing(loss: Tensor) -> None:
    """Raise UsageError if the loss was computed with reentrant checkpoints of torch.

    Its backward can't be limited to the parameters of one optimizer: those within would silently get no gradients.
    """
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise UsageError(
                "reentrant torch.utils.checkpoint does not work with several optimizers: pass use_reentrant=False to "
                "torch.utils.checkpoint.checkpoint."
            )
        pending += [following for following, _ in node.next_functions]
