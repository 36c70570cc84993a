"""The optimizer's step, taken only where every gradient is finite: look, clip, step.

On a CPU, and with optimizers that can't help it, the host reads what was found and then decides. A fused optimizer on a
GPU heeds the flag itself: its kernels are queued before the host knows, and the GPU does not wait for the host. What
tells them (``found_inf``) is the protocol between torch's ``GradScaler`` and the optimizers that support it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer


class GuardedStep:
    """A step that leaves weights and the optimizer's state as they were where a gradient is not finite.

    Args:
        device: where the gradients are.
        clip_norm: scale gradients so that the 2-norm of all together is at most this.
        clip_value: clamp each number in them to plus and minus this.
    """

    def __init__(self, device: torch.device, clip_norm: float | None, clip_value: float | None) -> None:
        self._clip_norm, self._clip_value = clip_norm, clip_value
        on_host = device.type == "cpu"
        self._found = torch.zeros((), device=device)
        self._found_on_host = torch.zeros((), pin_memory=not on_host)
        self._found_now = self._found.numpy().item if on_host else self._found.item  # numpy's is the quicker
        self._one = torch.ones((), device=device)
        # Gradients that were clamped would no longer tell which of them was infinite.
        self._may_flag = not on_host and clip_value is None
        self._all_dense_and_real = True

    def __call__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[Parameter],
        gradients: list[Tensor],
        losses: Sequence[Tensor] = (),
    ) -> tuple[bool, Tensor | None]:
        """Step if all gradients are finite; return whether they were, and their norm where ``clip_norm`` is set."""
        if self._may_flag and gradients and _heeds_a_flag(optimizer):
            return self._step_flagged(optimizer, parameters, gradients)
        norm = None
        if self._clip_norm is not None and self._clip_value is None:
            norm = get_total_norm(gradients)
        # A norm that is finite speaks for every gradient; one that is not may have overflowed.
        if gradients and (norm is None or not math.isfinite(norm.item())):
            self._look(gradients)
            if self._found_now():
                self._found.zero_()
                return False, None
        if self._clip_value is not None and gradients:
            torch._foreach_clamp_max_(gradients, self._clip_value)
            torch._foreach_clamp_min_(gradients, -self._clip_value)
        if self._clip_norm is not None:
            if norm is None:
                norm = get_total_norm(gradients)
            clip_grads_with_norm_(parameters, self._clip_norm, norm)
        optimizer.step()
        return True, norm

    def _look(self, gradients: list[Tensor]) -> None:
        """Set the flag to 1 where a gradient is not finite."""
        if self._all_dense_and_real:
            try:
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._one)
            except NotImplementedError:  # asking each gradient beforehand costs every model for the few that have such
                self._all_dense_and_real = False
        if not self._all_dense_and_real:
            numbers = [plain_numbers(g) for g in gradients]
            torch._amp_foreach_non_finite_check_and_unscale_(numbers, self._found, self._one)

    def _step_flagged(
        self, optimizer: Optimizer, parameters: Iterable[Parameter], gradients: list[Tensor]
    ) -> tuple[bool, Tensor | None]:
        """Let the optimizer look at the flag, and read it while its kernels run."""
        self._look(gradients)
        self._found_on_host.copy_(self._found, non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if self._found.is_cuda else None
        norm = None
        if self._clip_norm is not None:
            norm = get_total_norm(gradients)
            # By a norm of NaN, clipping would make every gradient NaN: none could be named as the first.
            clip_grads_with_norm_(parameters, self._clip_norm, torch.where(self._found > 0, 0.0, norm))
        optimizer.found_inf = self._found  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
        if copied is not None:
            copied.synchronize()
        if not self._found_on_host.item():
            return True, norm
        self._found.zero_()
        return False, None


def _heeds_a_flag(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernels leave everything as it was where ``found_inf`` is 1, as torch's fused ones do.

    Not in its first step: fused SGD would leave momentum behind that was never written.
    """
    return bool(optimizer.state) and getattr(optimizer, "_step_supports_amp_scaling", False)


def plain_numbers(gradient: Tensor) -> Tensor:
    """Return a dense and real view of all numbers in a gradient, which may be sparse or complex."""
    values = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values
