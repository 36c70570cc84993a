"""The optimizer's step, skipped if a gradient is non-finite: check, clip, step.

On a CPU, and with optimizers that are not fused, the host reads the result of the check and decides. On a GPU, the
kernels of a fused optimizer read it themselves (``found_inf``, as torch's ``GradScaler`` sets it). They are queued
before the host has read it, so the GPU does not wait for the host.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from unitrain.device import streams_of
from unitrain.training.hooks import StepHook


class GuardedStep(StepHook):
    """Clips gradients and steps an optimizer. Changes neither weights nor state if one is non-finite.

    Args:
        device: the device of the flag and the norm, usually of all gradients.
        clip_norm: the total 2-norm that gradients are scaled to if theirs is larger; None for no limit.
        forbids: given the norm of finite gradients before clipping, returns whether the step must not be made. It is
            asked only after ``measure``, and must return the same on all ranks.

    Attributes:
        all_plain: whether torch's kernel may be given all gradients at once: they are dense, on ``device``, and of
            dtypes that it supports (on a GPU, not bfloat16).
    """

    def __init__(
        self,
        device: torch.device,
        clip_norm: float | None,
        forbids: Callable[[float], bool] = lambda norm: False,
    ) -> None:
        self._forbids = forbids
        self._asks = False  # whether steps may be forbidden
        self._clip_norm = clip_norm
        self._streams = streams_of(device)
        on_host = self._streams is None
        # The flag, in the form of GradScaler's found_inf: 1 if a gradient is non-finite. Made once, as is its scale of
        # 1, since fused optimizers and the kernel that checks take both by reference.
        self._flag = torch.zeros((), dtype=torch.float32, device=device)
        self._flag_on_host = torch.zeros((), dtype=torch.float32, pin_memory=not on_host)
        self._read_flag = self._flag.numpy().item if device.type == "cpu" else self._flag.item  # numpy's is faster
        self._unit_scale = torch.ones((), dtype=torch.float32, device=device)
        self.all_plain: bool = True
        self.measure(for_verdicts=False)

    def measure(self, *, for_verdicts: bool) -> None:
        """Ask ``forbids`` from now on, or not. If so, the host waits for the norm of the gradients in every step."""
        self._asks = for_verdicts
        self._takes_norm = self._clip_norm is not None or for_verdicts
        self._may_flag = self._streams is not None and not for_verdicts
        self._only_checks = not self._takes_norm

    def watched(self, optimizer: Optimizer, trained: Sequence[Parameter]) -> None:
        """Find out whether all parameters are on ``device``."""
        # A kernel on another GPU than its flag's would write to memory that it may not have.
        self.all_plain &= all(p.device == self._flag.device for p in trained)

    def gradients(self, parameters: Iterable[Parameter]) -> list[Tensor]:
        """Return the gradients of the parameters that have one, as ``step`` takes them."""
        gradients = []
        for p in parameters:  # no comprehension, which before Python 3.12 costs a call in each step
            if (gradient := p.grad) is not None:
                gradients.append(gradient)
        return gradients

    def step(
        self,
        optimizer: Optimizer,
        parameters: Iterable[Parameter],
        gradients: list[Tensor],
        losses: Sequence[Tensor] = (),
    ) -> tuple[bool, Tensor | None]:
        """Step if all gradients and ``losses`` are finite.

        Args:
            optimizer: the optimizer.
            parameters: all of its parameters.
            gradients: as ``gradients`` returns them. Clipping changes them in place.
            losses: scalars that the host has not read.

        Returns:
            Whether the optimizer stepped, and the norm of the gradients if it is computed and finite.
        """
        if self._may_flag and gradients and getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._step_flagged(optimizer, parameters, gradients, losses)
        if self._only_checks and self.all_plain and not losses:
            # Each step of the usual run, which calls would make dearer. What is not usual is left to the lines below.
            try:
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._flag, self._unit_scale)
            except RuntimeError:
                self.all_plain = False
            else:
                if not self._read_flag():
                    optimizer.step()
                    return True, None
        norm = self._norm(parameters, gradients) if self._takes_norm else None
        # If the norm is finite, all gradients are; if it is not, it may have overflowed.
        known = norm is not None and math.isfinite(_added(norm, losses).item())
        if not known and not self._are_finite(gradients, losses):
            return False, None
        if self._asks and norm is not None and gradients and self._forbids(norm.item()):
            return False, norm
        self._clip(parameters, gradients, norm)
        optimizer.step()
        return True, norm

    def clip(self, parameters: Iterable[Parameter], gradients: list[Tensor], losses: Sequence[Tensor] = ()) -> bool:
        """Clip gradients as ``step`` does, without the optimizer's. Return whether they, and ``losses``, are finite."""
        finite = self._are_finite(gradients, losses)
        if finite and self._clip_norm is not None:
            self._clip(parameters, gradients, self._norm(parameters, gradients))
        return finite

    def _clip(self, parameters: Iterable[Parameter], gradients: list[Tensor], norm: Tensor | None) -> None:
        """Clip finite gradients in place, given their norm, if that is computed."""
        if self._clip_norm is not None and norm is not None:
            self._scale(parameters, gradients, self._clip_norm, norm)

    def _norm(self, parameters: Iterable[Parameter], gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of all gradients together, on ``device``."""
        return get_total_norm(gradients).to(self._flag.device)

    def _scale(self, parameters: Iterable[Parameter], gradients: list[Tensor], limit: float, norm: Tensor) -> None:
        """Scale gradients of this norm to the norm ``limit``, if theirs is larger."""
        clip_grads_with_norm_(parameters, limit, norm)

    def _are_finite(self, gradients: list[Tensor], losses: Sequence[Tensor]) -> bool:
        """Return whether all gradients and losses are finite. The host waits for the device."""
        self._check(gradients, losses)
        if not self._read_flag():
            return True
        self._flag.zero_()
        return False

    def _check(self, gradients: list[Tensor], losses: Sequence[Tensor]) -> None:
        """Set the flag to 1 if a gradient or a loss is non-finite."""
        if losses:
            gradients = [*gradients, *losses]
        if self.all_plain:
            try:
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._flag, self._unit_scale)
            except RuntimeError:  # cheaper than checking the layout and the device of each gradient beforehand
                self.all_plain = False
            else:
                return
        by_kind = defaultdict(list)
        for numbers in map(plain_numbers, gradients):
            if numbers.numel():
                by_kind[numbers.device, numbers.dtype].append(numbers)
        for same in by_kind.values():
            # The largest absolute value of a tensor is non-finite if any element is: inf and NaN propagate.
            largest = torch.stack(torch._foreach_norm(same, math.inf))
            is_bad = largest.isfinite().all().logical_not().to(self._flag.device)
            torch.logical_or(self._flag, is_bad, out=self._flag)

    def _step_flagged(
        self, optimizer: Optimizer, parameters: Iterable[Parameter], gradients: list[Tensor], losses: Sequence[Tensor]
    ) -> tuple[bool, Tensor | None]:
        """Step with an optimizer that reads the flag on the device, and read the flag while its kernels run."""
        norm = None
        if self._takes_norm:
            norm = self._norm(parameters, gradients)
            torch.logical_not(_added(norm, losses).isfinite(), out=self._flag)
        else:
            self._check(gradients, losses)
        # Copied before the step is queued, so that the host waits for the check alone, while the step's kernels run.
        self._flag_on_host.copy_(self._flag, non_blocking=True)
        copied = self._streams and self._streams.current_stream(self._flag.device).record_event()
        if norm is not None:
            # Clipping by a norm of NaN would make every gradient NaN, and hide which was the first.
            self._clip(parameters, gradients, torch.where(self._flag > 0, 0.0, norm))
        states = len(optimizer.state)
        optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
        if copied is not None:
            copied.synchronize()
        if not self._flag_on_host.item():
            return True, norm
        self._flag.zero_()
        # A parameter's first step creates state, which the kernels may have left uninitialised: fused SGD's momentum.
        for parameter in list(optimizer.state)[states:]:
            del optimizer.state[parameter]
        if norm is None or not self._are_finite(gradients, losses):
            return False, None
        # Only the norm overflowed. Nothing has changed yet, so step now.
        self._clip(parameters, gradients, norm)
        optimizer.step()
        return True, norm


def plain_numbers(gradient: Tensor) -> Tensor:
    """Return the values of a gradient, which may be sparse or complex, as a dense and real tensor."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def _added(norm: Tensor, losses: Sequence[Tensor]) -> Tensor:
    """Return the sum of a norm and losses, which may be on another device."""
    return sum((loss.to(norm.device) for loss in losses), norm)
