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
    """Check one result of each collective of a started backend, and that sums are the same on all ranks. Collective.

    The inputs of all ranks are known to each, so no rank trusts a result of the backend.

    Raises:
        BackendError: a collective raised an error, or its result has the wrong shape, values or type.
        CommunicationError: another rank ended meanwhile.
    """
    inputs = torch.stack([input_of(rank) for rank in range(backend.world_size)])
    contribution, last = inputs[backend.rank].to(backend.device), backend.world_size - 1
    reduced = {op: contribution.clone() for op in ("sum", "max", "min")}
    for op, expected in (("sum", inputs.sum(0)), ("max", inputs.amax(0)), ("min", inputs.amin(0))):
        operation = f"all_reduce with op {op!r}"
        _call(backend, operation, partial(backend.all_reduce, reduced[op], op, f"self_test.{op}"))
        _compare(backend, operation, reduced[op], expected)
    gathered = _call(backend, "all_gather", lambda: backend.all_gather(contribution.double(), "self_test.gather"))
    _compare(backend, "all_gather", gathered, inputs)
    # The source is the last rank: a backend that always broadcasts from rank 0 would pass otherwise.
    # Another value on each rank, as far as a byte can tell them apart.
    received = torch.full((4,), backend.rank % 251, dtype=torch.uint8, device=backend.device)
    _call(backend, "broadcast", lambda: backend.broadcast(received, last, "self_test.broadcast"))
    _compare(backend, f"broadcast from rank {last}", received, torch.full((4,), last % 251))
    # As bytes: two sums that differ in the last bit are close, but ranks that use them drift apart.
    total = reduced["sum"].view(torch.uint8)
    sums = _call(backend, "all_gather", lambda: backend.all_gather(total, "self_test.sums"))
    if not (sums == sums[0]).all():
        raise _wrong(backend, "all_reduce with op 'sum'", "gave different bits on different ranks, which would diverge")


def input_of(rank: int) -> Tensor:
    """Return the input of a rank: 64 float32 numbers in [0, 1), chosen so that their sums over ranks are rounded."""
    return torch.rand(64, generator=torch.Generator().manual_seed(rank))


def _call(backend: Backend, operation: str, start: Callable[[], Any]) -> Any:
    """Start a collective and wait for it. Report its error as one of the backend.

    Args:
        backend: the backend under test.
        operation: the name of the collective, for the message.
        start: starts the collective, and returns the function that waits for it.

    Returns:
        The result of that function.
    """
    try:
        wait = start()
        if not callable(wait):
            raise _wrong(backend, operation, f"returned {wait!r}, but must return a function that waits for the result")
        return wait()
    except UnitrainError:
        raise
    except Exception as error:
        if backend.is_engine_error(error):
            raise CommunicationError(
                f"rank {backend.rank} of {backend.world_size}: another rank ended during {operation}: {error}"
            ) from error
        raise _wrong(backend, operation, f"raised {type(error).__name__}: {error}") from error


def _compare(backend: Backend, operation: str, result: Any, expected: Tensor) -> None:
    """Raise BackendError unless a result is a tensor with the expected shape, and with its values up to rounding."""
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        form = tuple(result.shape) if isinstance(result, Tensor) else result
        raise _wrong(backend, operation, f"returned {form}, but must return a tensor of {tuple(expected.shape)}")
    if not torch.allclose(result.cpu().double(), expected.double()):
        values = f"{result.cpu().flatten().tolist()[:5]} instead of {expected.flatten().tolist()[:5]}"
        raise _wrong(backend, operation, f"gave {values} on rank {backend.rank} of {backend.world_size}")


def _wrong(backend: Backend, operation: str, failure: str) -> BackendError:
    """Return the error of a collective that does not do its work. ``failure`` completes the sentence."""
    return BackendError(
        f"backend {backend.name!r} ({type(backend).__module__}) failed its self-test: {operation} {failure}. See "
        f"docs/guide/backends.md, and `unitrain conform --backend {backend.name}`."
    )
