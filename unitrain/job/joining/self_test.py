"""A call of each of a backend's collectives at startup: a wrong one would train a wrong model without an error.

``unitrain conform`` tests every operation, dtype and size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unitrain.communication.backend import Backend
from unitrain.errors import BackendError, CommunicationError, UnitrainError


def check_collectives(backend: Backend) -> None:
    """Check one result of each collective of a started backend, and that sums are the same on all ranks. Collective."""
    inputs = torch.stack([input_of(rank) for rank in range(backend.world_size)])
    own, last = inputs[backend.rank].to(backend.device), backend.world_size - 1
    reduced = {op: own.clone() for op in ("sum", "max", "min")}
    for op, expected in (("sum", inputs.sum(0)), ("max", inputs.amax(0)), ("min", inputs.amin(0))):
        what = f"all_reduce with op {op!r}"
        _call(backend, what, partial(backend.all_reduce, reduced[op], op, f"self_test.{op}"))
        _compare(backend, what, reduced[op], expected)
    gathered = _call(backend, "all_gather", lambda: backend.all_gather(own.double(), "self_test.gather"))
    _compare(backend, "all_gather", gathered, inputs)
    received = torch.full((4,), backend.rank % 251, dtype=torch.uint8, device=backend.device)
    _call(backend, "broadcast", lambda: backend.broadcast(received, last, "self_test.broadcast"))
    _compare(backend, f"broadcast from rank {last}", received, torch.full((4,), last % 251))
    total = reduced["sum"].view(torch.uint8)
    sums = _call(backend, "all_gather", lambda: backend.all_gather(total, "self_test.sums"))
    if not (sums == sums[0]).all():
        raise _wrong(backend, "all_reduce with op 'sum'", "gave different bits on different ranks, which would diverge")


def input_of(rank: int) -> Tensor:
    """Return what a rank gives: numbers whose sums are rounded."""
    return torch.rand(64, generator=torch.Generator().manual_seed(rank))


def _call(backend: Backend, what: str, start: Callable[[], Any]) -> Any:
    """Start a collective and wait for it. Report its error as one of the backend."""
    try:
        wait = start()
        if not callable(wait):
            raise _wrong(backend, what, f"returned {wait!r}, but must return a function that waits for the result")
        return wait()
    except UnitrainError:
        raise
    except Exception as error:
        if backend.is_engine_error(error):
            raise CommunicationError(
                f"rank {backend.rank} of {backend.world_size}: another rank ended during {what}: {error}"
            ) from error
        raise _wrong(backend, what, f"raised {type(error).__name__}: {error}") from error


def _compare(backend: Backend, what: str, found: Any, expected: Tensor) -> None:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        form = tuple(found.shape) if isinstance(found, Tensor) else found
        raise _wrong(backend, what, f"returned {form}, but must return a tensor of {tuple(expected.shape)}")
    if not torch.allclose(found.cpu().double(), expected.double()):
        values = f"{found.cpu().flatten().tolist()[:5]} instead of {expected.flatten().tolist()[:5]}"
        raise _wrong(backend, what, f"gave {values} on rank {backend.rank} of {backend.world_size}")


def _wrong(backend: Backend, what: str, how: str) -> BackendError:
    return BackendError(
        f"backend {backend.name!r} ({type(backend).__module__}) failed its self-test: {what} {how}. See "
        f"docs/guide/backends.md, and `unitrain conform --backend {backend.name}`."
    )
