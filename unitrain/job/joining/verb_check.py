"""Self-test of a backend's collectives at startup: a wrong one would train a wrong model without an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from unitrain.communication.backend import Backend, Wait
from unitrain.errors import BackendError, CommunicationError, UnitrainError

_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
)  # fmt: skip
_MOST_SOURCES = 8
_ELEMENTS = 5

T = TypeVar("T")


def check_verbs(backend: Backend) -> None:
    """Check the results of every collective of a started backend. Collective; takes milliseconds.

    Every operation is tested with every dtype that the core uses, with many calls in flight.

    Raises:
        BackendError: a call failed, or its result is wrong on this rank; names the collective, op and dtype.
        CommunicationError: another rank has ended.
    """
    # All are started before the first wait, as gradient buckets are.
    for verb in [*_reductions(backend), *_gathers(backend), *_broadcasts(backend)]:
        _check(backend, verb)
    _check_same_bits(backend)


class _Verb(NamedTuple):
    """A call in flight."""

    what: str
    wait: Callable[[], Tensor]
    expected: Tensor


def _reductions(backend: Backend) -> Iterator[_Verb]:
    """Start reductions of small integers, whose sums every dtype represents exactly."""
    values = [torch.arange(_ELEMENTS) + rank % 3 for rank in range(backend.world_size)]
    everyone = torch.stack(values)
    results = {"sum": everyone.sum(0), "max": everyone.amax(0), "min": everyone.amin(0)}
    for dtype, (op, expected) in itertools.product(_DTYPES, results.items()):
        if expected.max() > _largest_exact(dtype):
            continue  # with so many ranks, the dtype can't represent the sum
        what = f"all_reduce of {_name(dtype)} with op {op!r}"
        tensor = values[backend.rank].to(backend.device, dtype, copy=True)
        wait = _started(backend, what, partial(backend.all_reduce, tensor, op, f"self_test.{op}.{_name(dtype)}"))
        yield _Verb(what, partial(_in_place, wait, tensor), expected)


def _gathers(backend: Backend) -> Iterator[_Verb]:
    expected = torch.arange(backend.world_size * _ELEMENTS).view(backend.world_size, _ELEMENTS) % 251
    for dtype in (torch.uint8, torch.float64):
        what = f"all_gather of {_name(dtype)}"
        own = expected[backend.rank].to(backend.device, dtype)
        wait = _started(backend, what, partial(backend.all_gather, own, f"self_test.gather.{_name(dtype)}"))
        yield _Verb(what, wait, expected)


def _broadcasts(backend: Backend) -> Iterator[_Verb]:
    """Start broadcasts from every rank, or from a few if there are many."""
    stride = -(-backend.world_size // _MOST_SOURCES)
    for src in sorted({*range(0, backend.world_size, stride), backend.world_size - 1}):
        what = f"broadcast from rank {src}"
        expected = (torch.arange(_ELEMENTS) * 7 + src) % 251
        own = expected if src == backend.rank else torch.zeros(_ELEMENTS)
        tensor = own.to(backend.device, torch.uint8, copy=True)
        wait = _started(backend, what, partial(backend.broadcast, tensor, src, f"self_test.broadcast.{src}"))
        yield _Verb(what, partial(_in_place, wait, tensor), expected)


def _in_place(wait: Wait, tensor: Tensor) -> Tensor:
    wait()
    return tensor


def _check(backend: Backend, verb: _Verb) -> None:
    found = _tried(backend, verb.what, verb.wait)
    if not isinstance(found, Tensor) or found.shape != verb.expected.shape:
        form = tuple(found.shape) if isinstance(found, Tensor) else found
        raise _wrong(backend, verb.what, f"returned {form}, but must return a tensor of {tuple(verb.expected.shape)}")
    if not torch.equal(found.cpu().to(torch.int64), verb.expected):
        values = f"{found.cpu().flatten().tolist()[:10]} instead of {verb.expected.flatten().tolist()[:10]}"
        raise _wrong(backend, verb.what, f"gave {values} on rank {backend.rank} of {backend.world_size}")


def _check_same_bits(backend: Backend) -> None:
    """Check that sums that need rounding have the same bits on all ranks: otherwise their weights diverge."""
    generator = torch.Generator().manual_seed(backend.rank)
    sums = torch.randn(64, generator=generator, dtype=torch.float64).to(backend.device)
    what = "all_reduce of float64 with op 'sum'"
    _tried(backend, what, lambda: backend.all_reduce(sums, "sum", "self_test.bits")())
    gathered = _tried(backend, "all_gather of float64", lambda: backend.all_gather(sums, "self_test.same")()).cpu()
    if not (gathered == gathered[0]).all():
        raise _wrong(backend, what, "gave different bits on different ranks, whose weights would diverge")


def _started(backend: Backend, what: str, call: Callable[[], T]) -> T:
    """Start a collective, which must return a function that waits for it."""
    wait = _tried(backend, what, call)
    if not callable(wait):
        raise _wrong(backend, what, f"returned {wait!r}, but must return a function that waits for the result")
    return wait


def _tried(backend: Backend, what: str, call: Callable[[], T]) -> T:
    """Call a collective, or wait for it; report its error as one of the backend."""
    try:
        return call()
    except UnitrainError:
        raise
    except Exception as error:
        if backend.is_engine_error(error):
            raise CommunicationError(
                f"rank {backend.rank} of {backend.world_size}: another rank ended during {what}: {error}"
            ) from error
        raise _wrong(backend, what, f"raised {type(error).__name__}: {error}") from error


def _wrong(backend: Backend, what: str, how: str) -> BackendError:
    return BackendError(
        f"backend {backend.name!r} ({type(backend).__module__}) failed its self-test: {what} {how}. See "
        f"docs/backends.md, and `unitrain conform --backend {backend.name}`."
    )


def _largest_exact(dtype: torch.dtype) -> float:
    return 2 / torch.finfo(dtype).eps if dtype.is_floating_point else torch.iinfo(dtype).max


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
