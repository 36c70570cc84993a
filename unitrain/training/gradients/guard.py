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

from unitrain.device import by_device, streams_of
from unitrain.errors import UsageError
from unitrain.training.hooks import StepHook


class GuardedStep(StepHook):
    """Clips gradients and steps an optimizer. Changes neither weights nor state if one is non-finite.

    Elements are clamped to ``clip_value`` before the norm is computed. ``device`` is that of the first gradient.
    ``forbids`` is given the norm of finite gradients before clipping, and returns whether there is to be no step. It is
    asked only after ``measure``.

    Attributes:
        all_plain: whether torch's kernel may be given all gradients at once: they are dense, and on ``device``.
    """

    def __init__(
        self,
        device: torch.device,
        clip_norm: float | None,
        clip_value: float | None,
        forbids: Callable[[float], bool] | None = None,
    ) -> None:
        self._forbids = forbids
        self._asks = False  # whether steps may be forbidden
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self._streams = streams_of(device)
        on_host = self._streams is None
        self._found = torch.zeros((), dtype=torch.float32, device=device)
        self._found_on_host = torch.zeros((), dtype=torch.float32, pin_memory=not on_host)
        self._found_now = self._found.numpy().item if device.type == "cpu" else self._found.item  # numpy's is faster
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self.all_plain: bool = True
        self._refused: set[torch.dtype] = set()
        self.measure(for_verdicts=False)

    def measure(self, *, for_verdicts: bool) -> None:
        """Ask ``forbids`` from now on, or not. Then the host needs the norm of the gradients in every step."""
        self._asks = for_verdicts
        self._takes_norm = self._clip_norm is not None or for_verdicts
        # Clamping makes infinite gradients finite, so they must be checked before it.
        self._may_flag = self._streams is not None and self._clip_value is None and not for_verdicts
        self._norm_tells = self._takes_norm and self._clip_value is None
        self._only_checks = not self._takes_norm and self._clip_value is None

    def watched(self, optimizer: Optimizer, trained: Sequence[Parameter]) -> None:
        """Find out whether all parameters are on ``device``."""
        # A kernel on another GPU than its flag's would write to memory that it may not have.
        self.all_plain &= all(p.device == self._found.device for p in trained)

    def gradients(self, parameters: Iterable[Parameter]) -> list[Tensor]:
        """Return the gradients of the parameters that have one, as ``__call__`` takes them."""
        return [gradient for p in parameters if (gradient := p.grad) is not None]

    def __call__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[Parameter],
        gradients: list[Tensor],
        losses: Sequence[Tensor] = (),
    ) -> tuple[bool, Tensor | None]:
        """Step if all gradients and ``losses`` are finite.

        Returns:
            Whether the optimizer stepped, and the norm of the gradients if it is computed and finite.
        """
        if self._may_flag and gradients and getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._step_flagged(optimizer, parameters, gradients, losses)
        if self._only_checks:
            if not self._are_finite(gradients, losses):
                return False, None
            optimizer.step()
            return True, None
        norm = self._norm(parameters, gradients) if self._norm_tells else None
        # If the norm is finite, all gradients are; if it is not, it may have overflowed.
        known = norm is not None and math.isfinite(_added(norm, losses).item())
        if not known and not self._are_finite(gradients, losses):
            return False, None
        if self._asks and self._forbids is not None and gradients:
            whole = self._norm(parameters, gradients) if norm is None else norm
            if self._forbids(whole.item()):
                return False, whole
        norm = self._clip(parameters, gradients, norm)
        optimizer.step()
        return True, norm

    def _clip(self, parameters: Iterable[Parameter], gradients: list[Tensor], norm: Tensor | None) -> Tensor | None:
        """Clip finite gradients, and return their norm if it is computed. ``norm`` is not None if it is known."""
        if self._clip_value is not None and gradients:
            for same in [gradients] if self.all_plain else by_device(gradients):
                _clamp(same, self._clip_value)
        if self._takes_norm and norm is None:
            norm = self._norm(parameters, gradients)
        if self._clip_norm is not None and norm is not None:
            self._scale(parameters, gradients, self._clip_norm, norm)
        return norm

    def _norm(self, parameters: Iterable[Parameter], gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of all gradients together, on ``device``."""
        return get_total_norm(gradients).to(self._found.device)

    def _scale(self, parameters: Iterable[Parameter], gradients: list[Tensor], limit: float, norm: Tensor) -> None:
        """Scale gradients of this norm to the norm ``limit``, if theirs is larger."""
        clip_grads_with_norm_(parameters, limit, norm)

    def _are_finite(self, gradients: list[Tensor], losses: Sequence[Tensor]) -> bool:
        """Return whether all gradients and losses are finite. The host waits for the device."""
        self._check(gradients, losses)
        if not self._found_now():
            return True
        self._found.zero_()
        return False

    def _check(self, gradients: list[Tensor], losses: Sequence[Tensor]) -> None:
        """Set the flag to 1 if a gradient or a loss is non-finite."""
        if losses:
            gradients = [*gradients, *losses]
        if self.all_plain:
            try:
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._one)
            except RuntimeError:  # cheaper than checking the layout and the device of each gradient beforehand
                self.all_plain = False
            else:
                return
        by_kind = defaultdict(list)
        for numbers in map(plain_numbers, gradients):
            if numbers.numel():
                by_kind[numbers.device, numbers.dtype].append(numbers)
        for (device, dtype), same in by_kind.items():
            self._check_plain(same, device, dtype)

    def _check_plain(self, same: list[Tensor], device: torch.device, dtype: torch.dtype) -> None:
        """Check tensors of one device and dtype, which torch's kernel may not support: on a GPU, bfloat16."""
        if device == self._found.device and dtype not in self._refused:
            try:
                torch._amp_foreach_non_finite_check_and_unscale_(same, self._found, self._one)
            except NotImplementedError:
                self._refused.add(dtype)
            else:
                return
        largest = torch.stack(torch._foreach_norm(same, math.inf))
        found = largest.isfinite().all().logical_not().to(self._found.device)
        torch.logical_or(self._found, found, out=self._found)

    def _step_flagged(
        self, optimizer: Optimizer, parameters: Iterable[Parameter], gradients: list[Tensor], losses: Sequence[Tensor]
    ) -> tuple[bool, Tensor | None]:
        """Step with an optimizer that reads the flag on the device, and read the flag while its kernels run."""
        norm = None
        if self._takes_norm:
            norm = self._norm(parameters, gradients)
            torch.logical_not(_added(norm, losses).isfinite(), out=self._found)
        else:
            self._check(gradients, losses)
        self._found_on_host.copy_(self._found, non_blocking=True)
        copied = self._streams and self._streams.current_stream(self._found.device).record_event()
        if self._clip_norm is not None and norm is not None:
            # Clipping by a norm of NaN would make every gradient NaN, and hide which was the first.
            self._scale(parameters, gradients, self._clip_norm, torch.where(self._found > 0, 0.0, norm))
        states = len(optimizer.state)
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


def _clamp(gradients: list[Tensor], limit: float) -> None:
    try:
        torch._foreach_clamp_max_(gradients, limit)
        torch._foreach_clamp_min_(gradients, -limit)
    except NotImplementedError as error:
        raise UsageError(
            "clip_value supports neither sparse nor complex gradients: use clip_norm, or embeddings with sparse=False."
        ) from error
