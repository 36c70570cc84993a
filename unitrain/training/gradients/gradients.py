"""Sums gradients over the ranks in flat buckets while backward still runs.

The default for backends with a library that does not average gradients itself. A parameter's gradient becomes a view of
its bucket, so that reducing a bucket is one call, without a copy back (Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training", VLDB 2020, describes buckets filled from hooks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from unitrain.communication.backend import Wait
from unitrain.communication.collectives import Collectives
from unitrain.errors import UsageError


class _Bucket:
    """A flat tensor with the gradients of several parameters of one dtype and device.

    After the gradients it holds an element per parameter, the number of ranks that have a gradient for it. If none
    has, ``grad`` stays None, as on one device, and weight decay and momentum don't change the parameter.
    """

    def __init__(self, parameters: Sequence[Parameter], name: str) -> None:
        self.parameters = parameters
        self.name = name
        size = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(size + len(parameters), dtype=parameters[0].dtype, device=parameters[0].device)
        # Libraries can't reduce complex tensors.
        self.real = torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat
        self.used = self.flat[size:]
        self.views = []
        offset = 0
        for p in parameters:
            # Its gradient has its parameter's strides (channels_last, say), which optimizers' fast paths need, or, if
            # these have gaps, strides of the same order.
            stride = torch.empty_like(p, device="meta").stride()
            self.views.append(self.flat.as_strided(p.size(), stride, offset))
            offset += p.numel()
        self.missing = len(parameters)  # gradients that the backward has not computed yet
        self.launched = False
        self.locally_unused: list[int] = []
        self.wire: Tensor | None = None
        self.wait: Wait | None = None

    def launch(self, collectives: Collectives, wire_dtype: torch.dtype | None, divisor: float) -> None:
        """Start to reduce the bucket, with zeros for missing gradients. From then on, each ``grad`` is a view of it."""
        self.launched = True
        self.locally_unused = [i for i, p in enumerate(self.parameters) if p.grad is None]
        self.used.fill_(1)
        views, gradients = self.views, [p.grad for p in self.parameters if p.grad is not None]
        if self.locally_unused:
            for i in self.locally_unused:
                self.views[i].zero_()
                self.used[i].zero_()
            views = [v for v, p in zip(self.views, self.parameters, strict=True) if p.grad is not None]
        if gradients:
            # One kernel for the whole bucket, and not one for each parameter.
            torch._foreach_copy_(views, gradients)
        for p, view in zip(self.parameters, self.views, strict=True):
            p.grad = view
        if divisor != 1:
            self.real.div_(divisor)
        self.wire = self.real.to(collectives.device, wire_dtype)
        self.wait = collectives.all_reduce_async(self.wire, "sum", self.name)

    def finish(self) -> None:
        """Wait for the sum. Set ``grad`` to None where no rank has a gradient."""
        if self.wait is not None:
            self.wait()
        if self.wire is not None and self.wire is not self.real:
            self.real.copy_(self.wire)
        if self.locally_unused:  # only then does the host wait for the device, to read the counts
            counts = self.used.tolist()
            for i in self.locally_unused:
                if counts[i] == 0:
                    self.parameters[i].grad = None
        self.missing, self.launched, self.wait, self.wire = len(self.parameters), False, None, None


class GradientReducer:
    """Sums the gradients of a fixed list of parameters over the ranks, overlapping backward.

    Hooks launch buckets in the thread that runs the backward, and the main thread waits for them in ``finish``. A
    backward raises UsageError if a parameter gets two gradients in it, or a sparse gradient.

    Args:
        parameters: in the order of registration; backward computes their gradients in roughly the reverse order.
        collectives: sum the buckets, on their device; that of a bucket may be another.
        armed: returns whether the running backward communicates, given a parameter with a gradient.
        name: prefix of the buckets' names, the same on all ranks.
        bucket_mb: size in MiB at which a bucket is complete.
        wire_dtype: reduce in this dtype (lossy) instead of the gradients' own.
        divisor: divides the sums.

    Attributes:
        parameters: as the argument.
        overlap: whether buckets are reduced while backward runs. If backward runs other collectives (BatchNorm's, or
            other buckets), ranks that use different parameters would call them in different orders.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        collectives: Collectives,
        *,
        armed: Callable[[Tensor], bool],
        name: str,
        bucket_mb: float = 25.0,
        wire_dtype: torch.dtype | None = None,
        divisor: float = 1,
    ) -> None:
        self._collectives = collectives
        self._armed = armed
        self._wire_dtype = wire_dtype
        self._divisor = divisor
        self.overlap: bool = True
        # Of 25 MiB by default, as DDP's: smaller ones cost calls, larger ones are complete later.
        self._buckets = [
            _Bucket(group, f"{name}.{i}") for i, group in enumerate(in_buckets(parameters, int(bucket_mb * 2**20)))
        ]
        self.parameters: frozenset[Parameter] = frozenset(parameters)
        self._next = 0
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for p in bucket.parameters
        ]

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        """Return a hook that is called with a parameter of the bucket once its gradient has been accumulated."""

        def gradient_is_ready(parameter: Tensor) -> None:
            if not self._armed(parameter):
                return
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which is not supported with "
                    "several processes: create its layer with sparse=False."
                )
            if bucket.launched:
                raise UsageError(
                    "a gradient was computed after its bucket had been reduced: either a second backward ran before "
                    "update() (pass the optimizer to each strategy.backward), or a reentrant checkpoint used a "
                    "parameter twice (use torch.utils.checkpoint with use_reentrant=False)."
                )
            bucket.missing -= 1
            # In the same order on every rank: libraries without names match collectives by their order.
            while self.overlap and self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
                self._launch_next()

        return gradient_is_ready

    def _launch_next(self) -> None:
        with torch.no_grad():
            self._buckets[self._next].launch(self._collectives, self._wire_dtype, self._divisor)
        self._next += 1

    def start(self) -> None:
        """Start to reduce the remaining buckets. Gradients must not change until ``finish`` returns. Collective."""
        while self._next < len(self._buckets):
            self._launch_next()

    def finish(self) -> None:
        """Reduce the remaining buckets and wait for all. Collective.

        Each ``grad`` is then the sum over the ranks, or None if no rank has a gradient.
        """
        self.start()
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.finish()
        self._next = 0

    def close(self) -> None:
        """Remove the hooks. Gradients are not changed."""
        for hook in self._hooks:
            hook.remove()


def in_buckets(parameters: Sequence[Parameter], cap_bytes: int) -> list[list[Parameter]]:
    """Group the parameters, last first, into buckets of one dtype and device of about ``cap_bytes`` each.

    Backward computes the gradients of the last layers first, so the first bucket is complete early. A parameter larger
    than the cap ends its bucket.
    """
    groups: list[list[Parameter]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[Parameter], int]] = {}
    for p in reversed(parameters):
        kind = (p.dtype, p.device)
        group, size = open_groups.get(kind, ([], 0))
        if not group:  # a new bucket, in the order of its first gradient
            groups.append(group)
        group.append(p)
        size += p.numel() * p.element_size()
        open_groups[kind] = (group, size) if size < cap_bytes else ([], 0)
    return groups
