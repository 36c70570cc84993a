"""The state at the last boundary between two steps, as far as what follows changes it before the end of the next step.

When a rank dies, the others are in their next step: they wait in its backward, or are before it. Their weights and
optimizers are those of the last boundary, since only the end of a step changes them, and are not copied. But the
forward has changed buffers, the loader is further on, and the script may have changed its dicts. So each boundary
copies the buffers that steps change, and the dicts, and records some ints.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.checkpoint.emergency.epoch_end import EpochEnd, EpochEndHook
from unitrain.checkpoint.run_state import RunState
from unitrain.data import Loader
from unitrain.data.structure import rebuilt
from unitrain.errors import CheckpointError
from unitrain.pulse import USER_CODE, Pulse
from unitrain.training.hooks import StepHook

_POLL_S = 0.005
# How long the main thread may need to leave a collective that has just been completed.
_LEAVE_S = 0.2
# Larger tensors are not copied: that would take time in each step.
_MOST_BYTES = 2**22
# Of longer lists, only the length is recorded: they may be appended to.
_LONG = 16


class Recorded(NamedTuple):
    """What was recorded at a boundary."""

    step: int  # number of optimizer steps so far
    ended: EpochEnd | None  # at the end of an epoch's training, if what follows it in the script is not done yet
    weights: list[int]  # versions of the parameters
    positions: list[dict[str, Any]]  # positions of the loaders
    dicts: list[Any] | None  # copies, with a _Beginning in place of each long list; None if a tensor is too large
    scheduled: list[int]  # how often each scheduler was stepped


class LastBoundary(StepHook):
    """Records the state at each boundary, and keeps the main thread from changing the weights after the last one."""

    place = 0

    def __init__(self, state: RunState, epoch_end: EpochEndHook, pulse: Pulse) -> None:
        self._epoch_end = epoch_end
        self._pulse = pulse
        objects = state.objects
        layers = dict.fromkeys(layer for module in state.modules.values() for layer in module.modules())
        self._parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters(recurse=False)))
        self._buffers = [_Buffer(layer, name) for layer in layers for name in layer._buffers]
        self._loaders = {name: value for name, value in objects.items() if isinstance(value, Loader)}
        self._dicts = {name: value for name, value in objects.items() if isinstance(value, dict)}
        self._schedulers = [
            value
            for value in objects.values()
            if isinstance(getattr(value, "last_epoch", None), int) and not isinstance(value, nn.Module)
        ]
        self._last: Recorded | None = None
        self._changing = True  # until the first boundary
        self._held = False

    def at_boundary(self) -> None:
        """Record the state at a boundary."""
        self._record(None)

    def at_epoch_end(self) -> None:
        """Record the state at the end of an epoch's training."""
        self._record(self._epoch_end.last)

    def _record(self, ended: EpochEnd | None) -> None:
        """Record the state at a boundary: at the end of an epoch's training if ``ended`` is given."""
        was_changing, self._changing = self._changing, True
        if self._held and not was_changing:  # what was recorded is being saved
            self._changing = False
            return
        self._copy_buffers()
        try:
            dicts = [_copied(value) for value in self._dicts.values()]
        except _LargeTensorError:
            dicts = None
        self._last = Recorded(
            self._pulse.step,
            ended,
            [p._version for p in self._parameters],
            [loader.position for loader in self._loaders.values()],
            dicts,
            [scheduler.last_epoch for scheduler in self._schedulers],
        )
        self._changing = False

    def _copy_buffers(self) -> None:
        # In a call for several dtypes, torch copies one tensor after another.
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for buffer in self._buffers:
            pair = buffer.record()
            if pair is not None:
                copies, changed = by_dtype.setdefault(pair[0].dtype, ([], []))
                copies.append(pair[0])
                changed.append(pair[1])
        with torch.no_grad():
            for copies, changed in by_dtype.values():
                torch._foreach_copy_(copies, changed)

    def before_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Record that weights are about to change. Does not return while the state is being saved."""
        self._changing = True
        if self._held:
            self._changing = False
            threading.Event().wait()  # for the end of this process

    def hold(self, patience_s: float) -> Recorded | str:
        """Keep the state as it is from now on. Return what was recorded, or why the state is not that of a boundary.

        Args:
            patience_s: how long to wait for the main thread if it is between a step and the boundary after it.
        """
        self._held = True
        began = time.monotonic()
        while self._changing:
            if self._last is None:
                return ""  # nothing was trained yet
            # In a collective, it waits in vain for the rank that is gone.
            if time.monotonic() - began > (patience_s if self._pulse.phase == USER_CODE else _LEAVE_S):
                return f"the script was in {self._pulse.phase} after step {self._pulse.step}, and not at its next batch"
            time.sleep(_POLL_S)
        assert self._last is not None
        return self.changed(self._last) or self._last

    def changed(self, last: Recorded) -> str:
        """Return what was changed since a boundary and can't be brought back, or an empty string."""
        what = ""
        if [p._version for p in self._parameters] != last.weights:
            what = "weights were changed outside of strategy.step"
        elif any(buffer.is_lost for buffer in self._buffers):
            what = "a buffer was changed of which there is no copy"
        elif last.ended is None and [scheduler.last_epoch for scheduler in self._schedulers] != last.scheduled:
            what = "a scheduler was stepped outside of strategy.step"
        elif last.ended is None and last.dicts is None:
            what = f"a dict had a tensor of more than {_MOST_BYTES} bytes, which is not copied at each step,"
        return f"{what} after step {last.step}" if what else ""

    def applied_to(self, parts: Mapping[str, Any], last: Recorded) -> dict[str, Any]:
        """Return the states of all objects as they were at the boundary, given those of now."""
        copies = {
            (now.data_ptr(), now.shape): buffer.copy
            for buffer in self._buffers
            if buffer.copy is not None and (now := buffer.now) is not None and now.numel()
        }

        def before(value: Any) -> Any:
            return copies.get((value.data_ptr(), value.shape), value) if isinstance(value, Tensor) else value

        earlier = {name: rebuilt(state, before) for name, state in parts.items()}
        for name, position in zip(self._loaders, last.positions, strict=True):
            earlier[name] = {**earlier[name], **position}
        earlier.update(zip(self._dicts, map(_restored, last.dicts or []), strict=False))
        return earlier if last.ended is None else last.ended.applied_to(earlier)


class _Buffer:
    """A buffer of a layer, which may assign another tensor to it."""

    __slots__ = ("copy", "layer", "name", "seen", "version")

    def __init__(self, layer: nn.Module, name: str) -> None:
        self.layer, self.name = layer._buffers, name
        self.seen = self.layer[name]  # what it was at the last boundary
        self.version = _version(self.seen)
        self.copy: Tensor | None = None  # once a step has changed it, unless it is large

    @property
    def now(self) -> Tensor | None:
        """The buffer."""
        return self.layer.get(self.name)

    @property
    def is_lost(self) -> bool:
        """Whether it has changed since the last boundary, and there is no copy."""
        return self.copy is None and (self.now is not self.seen or _version(self.now) != self.version)

    def record(self) -> tuple[Tensor, Tensor] | None:
        """Copy it, at a boundary, if a step has changed it; or return a copy, and what is to be copied to it."""
        now = self.layer.get(self.name)
        version = 0 if now is None else now._version
        if now is self.seen and version == self.version:
            return None
        unseen, self.seen, self.version = now is not self.seen, now, version
        if now is None or now.nbytes > _MOST_BYTES:
            self.copy = None
        elif self.copy is None or unseen or now.shape != self.copy.shape:
            self.copy = now.detach().clone()
        else:
            return self.copy, now
        return None


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor._version


class _LargeTensorError(Exception):
    """A tensor is too large to be copied at each step."""


class _Beginning(NamedTuple):
    """The beginning of a long list."""

    items: list[Any]
    length: int


def _copied(value: Any) -> Any:
    """Return a copy of plain values and tensors. Raises _LargeTensorError."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return _Beginning(value, len(value)) if len(value) > _LONG else [_copied(item) for item in value]
    if isinstance(value, Tensor):
        if value.nbytes > _MOST_BYTES:
            raise _LargeTensorError
        return value.detach().clone()
    return value


def _restored(copied: Any) -> Any:
    """Return what was copied. Raises CheckpointError if a long list has lost items since."""
    if isinstance(copied, _Beginning):
        if len(copied.items) < copied.length:
            raise CheckpointError("a long list was shortened after the last step")
        return copied.items[: copied.length]
    if isinstance(copied, dict):
        return {key: _restored(item) for key, item in copied.items()}
    return list(map(_restored, copied)) if isinstance(copied, list) else copied
