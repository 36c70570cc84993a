"""A call of each of a backend's collectives at startup: a wrong one would train a wrong model without an error.

``unitrain conform`` tests every operation, dtype and size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unitrain.communication.backend import Backend
from unitrain.errors import BackendError


def check_collectives(backend: Backend) -> None:
    """Check one result of each collective of a started backend, and that sums are the same on all ranks. Collective.

    The inputs of all ranks are known to each, so no rank trusts a result of the backend.

    Raises:
        BackendError: the result of a collective has the wrong shape, values or type.
    """
    inputs = torch.stack([input_of(rank) for rank in range(backend.world_size)])
    contribution, last = inputs[backend.rank].to(backend.device), backend.world_size - 1
    reduced = {op: contribution.clone() for op in ("sum", "max", "min")}
    for op, expected in (("sum", inputs.sum(0)), ("max", inputs.amax(0)), ("min", inputs.amin(0))):
        backend.all_reduce(reduced[op], op, f"self_test.{op}")()
        _compare(backend, f"all_reduce with op {op!r}", reduced[op], expected)
    gathered = backend.all_gather(contribution.double(), "self_test.gather")()
    _compare(backend, "all_gather", gathered, inputs)
    # The source is the last rank: a backend that always broadcasts from rank 0 would pass otherwise.
    # Another value on each rank, as far as a byte can tell them apart.
    received = torch.full((4,), backend.rank % 251, dtype=torch.uint8, device=backend.device)
    backend.broadcast(received, last, "self_test.broadcast")()
    _compare(backend, f"broadcast from rank {last}", received, torch.full((4,), last % 251))
    # As bytes: two sums that differ in the last bit are close, but ranks that use them drift apart.
    total = reduced["sum"].view(torch.uint8)
    sums = backend.all_gather(total, "self_test.sums")()
    if not (sums == sums[0]).all():
        raise _wrong(backend, "all_reduce with op 'sum'", "gave different bits on different ranks, which would diverge")


def input_of(rank: int) -> Tensor:
    """Return the input of a rank: 64 float32 numbers in [0, 1), chosen so that their sums over ranks are rounded."""
    return torch.rand(64, generator=torch.Generator().manual_seed(rank))


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
