"""The cases of Horovod's parallel PyTorch tests, written for any module with Horovod's API.

A case has the name of Horovod's test, without ``test_`` and ``horovod_``. It gets the module, and returns values that
are compared with those of the real one: tensors, numbers, kinds of errors. ``.ci/gpu`` runs them on a GPU.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Case = Callable[[Any], Any]
R = TypeVar("R")
CASES: dict[str, Case] = {}

REDUCED = (torch.int32, torch.int64, torch.float32, torch.float64, torch.float16)
MOVED = (torch.uint8, torch.int8, torch.int16, *REDUCED)
FLOATS = (torch.float32, torch.float64)
KINDS = (ValueError, TypeError, AssertionError, RuntimeError)  # NotImplementedError is a RuntimeError
LATE_S = 0.3
OFTEN: dict[str, dict[str, Any]] = {
    "grad": {"dtypes": FLOATS, "grad": True},
    "grad_process_sets": {"dtypes": FLOATS, "grad": True, "in_set": True},
    "process_sets": {"in_set": True},
}


def outcomes(module: str, backend: str, names: list[str]) -> dict[str, Any]:
    """Run cases with a module on this rank, one after another, and return their results by their names."""
    os.environ |= {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "UNITRAIN_BACKEND": backend, "UNITRAIN_DEVICE": "cpu"}
    hvd = import_module(module)
    hvd.init()
    try:
        return {name: outcome(CASES[name], hvd) for name in names}
    finally:
        hvd.shutdown()


def outcome(case: Case, hvd: Any) -> Any:
    """Return the result of a case, or its error as a string."""
    try:
        return case(hvd)
    except Exception as error:  # of a bug, most likely on all ranks: the next cases show more
        return f"{type(error).__name__}: {error}"


def case(function: Callable[..., R]) -> Callable[..., R]:
    CASES[function.__name__] = function
    return function


def raised(call: Callable[[], Any]) -> str:
    """Return the kind of error that a call raises."""
    try:
        call()
    except KINDS as error:
        return next(kind.__name__ for kind in KINDS if isinstance(error, kind))
    return "nothing"


@contextmanager
def process_set(hvd: Any) -> Iterator[Any]:
    """Make a set of the even ranks and another of the odd ones, and return the one with this rank."""
    sets = [hvd.add_process_set(list(range(first, hvd.size(), 2))) for first in (0, 1)]
    yield sets[hvd.rank() % 2]
    for one in reversed(sets):
        hvd.remove_process_set(one)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return eighths, of which a sum of a few is exact in every type, or small whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0 if dtype == torch.uint8 else -40, 41, shape, generator=generator)
    return (whole / 8 if dtype.is_floating_point else whole).to(dtype)


# -------------------------------------------------------------------------------------------------------- collectives


def collective(
    hvd: Any,
    verb: str,
    dtypes: tuple[torch.dtype, ...] = REDUCED,
    rows: Callable[[int, int], int] = lambda rank, size: 6,
    later: bool = False,
    grad: bool = False,
    in_set: bool = False,
    **options: Any,
) -> Any:
    """Call a function with tensors of each type, of 1 to 3 dimensions, and return its results and gradients.

    Args:
        hvd: the module.
        verb: the function's name.
        dtypes: the types.
        rows: returns the first dimension, given the rank and the size of its group.
        later: whether to start all operations before the first is waited for.
        grad: whether to return gradients, too.
        in_set: whether only the even, or only the odd ranks take part.
        **options: arguments; functions of the rank and the size are called, and names of operations are looked up.
    """
    if in_set:
        with process_set(hvd) as ranks:
            return collective(hvd, verb, dtypes, rows, later, grad, process_set=ranks, **options)
    rank, size = (options.get("process_set", hvd)).rank(), (options.get("process_set", hvd)).size()
    for name, value in options.items():
        if name == "op":
            options[name] = getattr(hvd, value)
        elif name in ("splits", "root_rank"):
            options[name] = value(hvd.rank(), size)
    shapes = [(rows(rank, size), 5, 3)[: 1 + i % 3] for i in range(len(dtypes))]
    given = [numbers(shape, dtypes[i], 10 * hvd.rank() + i) for i, shape in enumerate(shapes)]
    for tensor in given:
        tensor.requires_grad_(grad)
    function = getattr(hvd, verb)
    if verb.startswith("grouped"):
        results = [function([tensor, tensor.detach() + 1], **options) for tensor in given]
    elif later:
        handles = [function(tensor, name=f"{verb}.{i}", **options) for i, tensor in enumerate(given)]
        while not hvd.poll(handles[-1]):
            time.sleep(0.001)
        results = [hvd.synchronize(handle) for handle in handles]
    else:
        results = [function(tensor, **options) for tensor in given]
    if not grad:
        return results, given
    firsts = [result[0] if isinstance(result, list | tuple) else result for result in results]
    for i, result in enumerate(firsts):
        result.backward(numbers(tuple(result.shape), result.dtype, 100 + 10 * hvd.rank() + i))
    return [result.detach() for result in firsts], [tensor.grad for tensor in given]


def unequal(rank: int, size: int) -> int:
    return 3 + 2 * rank


def scaled(verb: str, **options: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    prescale, postscale = {"prescale_factor": 0.3712}, {"postscale_factor": 0.3712}
    return {
        f"{verb}_prescale": (verb, {"op": "Sum", **prescale, **options}),
        f"{verb}_postscale": (verb, {"op": "Sum", **postscale, **options}),
    }


ALLTOALL: dict[str, Any] = {"dtypes": MOVED, "rows": lambda rank, size: (rank + 1) * size}
SPLIT = ALLTOALL | {
    "rows": lambda rank, size: sum(range(1, size + 1)),
    "splits": lambda rank, size: torch.arange(1, size + 1, dtype=torch.int32).roll(rank),
}
COLLECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce": ("allreduce", {"op": "Sum"}),
    "allreduce_average": ("allreduce", {"average": True}),
    "allreduce_min": ("allreduce", {"op": "Min"}),
    "allreduce_max": ("allreduce", {"op": "Max"}),
    "allreduce_product": ("allreduce", {"op": "Product"}),
    "allreduce_inplace": ("allreduce_", {"average": False}),
    "allreduce_async_fused": ("allreduce_async", {"op": "Sum", "later": True}),
    "allreduce_async_inplace": ("allreduce_async_", {"later": True}),
    **scaled("allreduce"),
    "allreduce_grad_average": ("allreduce", OFTEN["grad"]),
    "grouped_allreduce": ("grouped_allreduce", {"op": "Sum"}),
    "grouped_allreduce_average": ("grouped_allreduce", {}),
    "grouped_allreduce_inplace": ("grouped_allreduce_", {"op": "Sum"}),
    "grouped_allreduce_grad_average": ("grouped_allreduce", OFTEN["grad"]),
    "allgather": ("allgather", {"dtypes": MOVED}),
    "allgather_variable_size": ("allgather", {"dtypes": MOVED, "rows": unequal}),
    "allgather_async_fused": ("allgather_async", {"dtypes": MOVED, "rows": unequal, "later": True}),
    "grouped_allgather": ("grouped_allgather", {"dtypes": MOVED, "rows": unequal}),
    "broadcast": ("broadcast", {"dtypes": MOVED, "root_rank": lambda rank, size: size - 1}),
    "broadcast_inplace": ("broadcast_", {"dtypes": MOVED, "root_rank": lambda rank, size: 0}),
    "alltoall": ("alltoall", SPLIT),
    "alltoall_equal_split": ("alltoall", ALLTOALL),
    "alltoall_equal_split_grad": ("alltoall", ALLTOALL | OFTEN["grad"]),
    "reducescatter": ("reducescatter", {"op": "Sum"}),
    "reducescatter_average": ("reducescatter", {}),
    "reducescatter_uneven": ("reducescatter", {"op": "Sum", "rows": lambda rank, size: 7}),
    "reducescatter_async_fused": ("reducescatter_async", {"op": "Sum", "later": True}),
    **scaled("reducescatter"),
    "reducescatter_grad_average": ("reducescatter", OFTEN["grad"]),
    "grouped_reducescatter": ("grouped_reducescatter", {"op": "Sum"}),
    "grouped_reducescatter_average": ("grouped_reducescatter", {}),
    **scaled("grouped_reducescatter"),
}
PLAIN: dict[str, dict[str, Any]] = {
    "allreduce": {"op": "Sum"},
    "grouped_allreduce": {"op": "Sum"},
    "allgather": {"rows": unequal},
    "grouped_allgather": {"rows": unequal},
    "broadcast": {"root_rank": lambda rank, size: rank % 2},
    "alltoall": SPLIT,
    "reducescatter": {"op": "Sum"},
    "grouped_reducescatter": {"op": "Sum"},
}
for verb, more in PLAIN.items():
    of_all = {"root_rank": lambda rank, size: size - 1} if verb == "broadcast" else {}
    for name, kind in OFTEN.items():
        COLLECTIVES[f"{verb}_{name}"] = (verb, {**more, **({} if "set" in name else of_all), **kind})
CASES |= {name: partial(collective, verb=verb, **options) for name, (verb, options) in COLLECTIVES.items()}


# ------------------------------------------------------------------------------------------------------------- errors


def mixed(hvd: Any) -> Tensor:
    """Return a tensor of another type on odd ranks."""
    return torch.zeros(6, 6, dtype=torch.float32 if hvd.rank() % 2 else torch.int32)


def taller(hvd: Any, dim: int) -> Tensor:
    """Return a tensor that is longer on later ranks in one dimension."""
    return torch.ones([6 * (hvd.rank() + 1) if i == dim else 6 for i in range(3)])


def reshaped(hvd: Any) -> Tensor:
    return torch.ones(6, 35) if hvd.rank() else torch.ones(6, 5, 7)


ERRORS: dict[str, list[Callable[[Any], Any]]] = {
    "allreduce_error": [lambda hvd: hvd.allreduce(taller(hvd, 0)), lambda hvd: hvd.allreduce(reshaped(hvd))],
    "allreduce_type_error": [lambda hvd: hvd.allreduce(mixed(hvd))],
    "allgather_error": [lambda hvd: hvd.allgather(taller(hvd, 1))],
    "allgather_type_error": [lambda hvd: hvd.allgather(mixed(hvd))],
    "broadcast_error": [lambda hvd: hvd.broadcast(taller(hvd, 1), 0)],
    "broadcast_type_error": [lambda hvd: hvd.broadcast(mixed(hvd), 0)],
    "broadcast_rank_error": [lambda hvd: hvd.broadcast(torch.ones(3), hvd.rank())],
    "alltoall_type_error": [lambda hvd: hvd.alltoall(mixed(hvd))],
    "alltoall_rank_error": [lambda hvd: hvd.alltoall(taller(hvd, 1))],
    "alltoall_equal_split_length_error": [lambda hvd: hvd.alltoall(torch.ones(hvd.size() + 1))],
    "alltoall_splits_error": [
        lambda hvd: hvd.alltoall(torch.ones(hvd.size() - 1), torch.ones(hvd.size(), dtype=torch.int32))
    ],
    "alltoall_splits_type_error": [lambda hvd: hvd.alltoall(torch.ones(hvd.size()), torch.ones(hvd.size()))],
    "reducescatter_error": [
        lambda hvd: hvd.reducescatter(taller(hvd, 0)),
        lambda hvd: hvd.reducescatter(reshaped(hvd)),
    ],
    "reducescatter_type_error": [lambda hvd: hvd.reducescatter(mixed(hvd))],
    "reducescatter_scalar_error": [lambda hvd: hvd.reducescatter(torch.tensor(1.0))],
    "grouped_reducescatter_scalar_error": [
        lambda hvd: hvd.grouped_reducescatter([torch.zeros(6, 1), torch.tensor(1.0)])
    ],
    "reducescatter_adasum": [lambda hvd: hvd.reducescatter(torch.ones(6), op=hvd.Adasum)],
    "average_and_op": [lambda hvd: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)],
    "not_contiguous": [lambda hvd: hvd.allreduce(torch.ones(2, 3).t())],
}


def errors(hvd: Any, calls: list[Callable[[Any], Any]]) -> list[Any]:
    """Return the kinds of errors, and a sum, which works after each of them."""
    return [value for call in calls for value in (raised(partial(call, hvd)), hvd.allreduce(torch.ones(2), op=hvd.Sum))]


CASES |= {name: partial(errors, calls=calls) for name, calls in ERRORS.items()}


def duplicate_name(hvd: Any, verb: str, **options: Any) -> list[Any]:
    """Start an operation twice by one name, which is an error before other ranks have come, and wait for the first."""
    start = partial(getattr(hvd, verb), torch.ones(6), name="duplicate", **options)
    if hvd.rank():
        time.sleep(LATE_S)
    handle = start()
    kind = raised(start) if hvd.rank() == 0 else ""
    return [kind, hvd.synchronize(handle)]


for verb in ("allreduce", "allgather", "broadcast", "reducescatter"):
    CASES[f"{verb}_duplicate_name_error"] = partial(
        duplicate_name, verb=f"{verb}_async", **({"root_rank": 0} if verb == "broadcast" else {})
    )


# --------------------------------------------------------------------------------------------------------- the process


@case
def rank(hvd: Any) -> list[int]:
    return [hvd.rank(), hvd.local_rank(), hvd.cross_rank()]


@case
def size(hvd: Any) -> list[Any]:
    return [hvd.size(), hvd.local_size(), hvd.cross_size(), hvd.global_process_set.size(), hvd.global_process_set.ranks]


@case
def is_initialized(hvd: Any) -> list[Any]:
    """Begin anew; without ``init``, ranks are unknown."""
    before = hvd.is_initialized()
    hvd.shutdown()
    middle = [hvd.is_initialized(), raised(hvd.rank)]
    hvd.init()
    return [before, middle, hvd.is_initialized()]


@case
def reinit(hvd: Any) -> list[Any]:
    hvd.shutdown()
    hvd.init()
    return [hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(2), op=hvd.Sum)]


@case
def global_barrier_op(hvd: Any, **options: Any) -> bool:
    """Return whether this rank has left a barrier after rank 0 had come to it, by the clock of this machine."""
    hvd.barrier()
    if hvd.rank() == 0:
        time.sleep(LATE_S)
    came = time.monotonic()
    hvd.barrier(**options)
    left = time.monotonic()
    return bool(hvd.allgather(torch.tensor([came], dtype=torch.float64))[0] <= left)


@case
def process_set_barrier_op(hvd: Any) -> bool:
    with process_set(hvd) as ranks:
        waited = global_barrier_op(hvd, process_set=ranks)
    return waited or hvd.rank() % 2 == 1  # the odd ranks have a barrier of their own


@case
def barrier_with_multiple_collectives(hvd: Any) -> list[Any]:
    handles = [
        hvd.broadcast_async(torch.eye(3), root_rank=0),
        hvd.allgather_async(torch.eye(5)),
        hvd.allgather_async(torch.zeros(5, 5)),
        hvd.allreduce_async(torch.eye(5)),
    ]
    hvd.barrier()
    return [hvd.synchronize(handle) for handle in handles]


def joined(hvd: Any, meanwhile: Callable[[], Any]) -> list[Any]:
    """Have one rank after another join first, while the others do something."""
    done = []
    for first in range(hvd.size()):
        done += [meanwhile() if hvd.rank() != first else None, hvd.join()]
    return done


@case
def join_allreduce(hvd: Any) -> list[Any]:
    def meanwhile() -> list[Tensor]:
        given = [numbers((5, 2), dtype, 1) for dtype in REDUCED[:4]]
        handles = [hvd.allreduce_async(tensor, name=f"join.{i}") for i, tensor in enumerate(given)]
        return [hvd.synchronize(handle) for handle in handles]

    return joined(hvd, meanwhile)


@case
def join_allgather(hvd: Any) -> list[Any]:
    return joined(hvd, lambda: raised(lambda: hvd.allgather(torch.ones(3))))


@case
def join_broadcast(hvd: Any) -> list[Any]:
    return joined(hvd, lambda: raised(lambda: hvd.broadcast(torch.ones(3), hvd.rank(), name="join")))


# ------------------------------------------------------------------------------------------------ objects, compression


@case
def broadcast_object(hvd: Any) -> Any:
    return hvd.broadcast_object({"hello": 123, 0: [1, 2]} if hvd.rank() == 0 else {}, root_rank=0)


@case
def broadcast_object_process_sets(hvd: Any) -> Any:
    with process_set(hvd) as ranks:
        return hvd.broadcast_object({"from": hvd.rank()}, root_rank=hvd.rank() % 2, process_set=ranks)


@case
def allgather_object(hvd: Any) -> Any:
    return hvd.allgather_object({"rank": hvd.rank(), **({"more": "x" * 50} if hvd.rank() == 1 else {})})


@case
def compression_fp16(hvd: Any) -> list[Any]:
    done = []
    for dtype in (*FLOATS, torch.uint8, torch.int64):
        small, context = hvd.Compression.fp16.compress(numbers((5, 5), dtype, 1) * 3)
        done += [small, hvd.Compression.fp16.decompress(small, context)]
    return [*done, hvd.allreduce(torch.full((3,), 0.1), compression=hvd.Compression.fp16)]


def random_sparse(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (numbers((9, 4), torch.float32, seed) * (torch.rand(9, 4, generator=generator) > 0.7)).to_sparse()


@case
def async_sparse_allreduce(hvd: Any, **options: Any) -> list[Tensor]:
    handles = [
        hvd.sparse_allreduce_async(random_sparse(10 * hvd.rank() + i), name=str(i), op=op, **options)
        for i, op in enumerate((hvd.Average, hvd.Sum))
    ]
    return [handle().to_dense() for handle in handles]


@case
def async_sparse_allreduce_process_sets(hvd: Any) -> list[Tensor]:
    with process_set(hvd) as ranks:
        return async_sparse_allreduce(hvd, process_set=ranks)


# ------------------------------------------------------------------------------------------------------------ training


class Branches(nn.Module):
    """Three layers, of which the last is used on odd ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, last: bool = True) -> Tensor:
        x = self.second(F.relu(self.first(x)))
        out: Tensor = self.third(F.relu(x)) if last else x
        return out


def net(hvd: Any, kind: Callable[[], nn.Module] = Branches) -> nn.Module:
    """Return a network that is another on each rank, until rank 0's weights are broadcast."""
    torch.manual_seed(hvd.rank())
    model = kind()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


def batch(hvd: Any, step: int = 0) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))


def trained(
    hvd: Any, kind: Any = torch.optim.SGD, passes: int = 1, last: bool = True, settings: Any = None, **options: Any
) -> list[Any]:
    """Train three steps, and return the weights and the optimizer's state."""
    model: Any = net(hvd)
    if "named_parameters" not in options:
        options["named_parameters"] = model.named_parameters()
    if isinstance(options.get("groups"), str):
        options["groups"] = [list(model.first.parameters()), [model.second.weight]]
    settings = {"lr": 0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}), **(settings or {})}
    optimizer = hvd.DistributedOptimizer(kind(model.parameters(), **settings), **options)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(passes):
            model(batch(hvd, passes * step + part), last).square().mean().backward()
        optimizer.step()
    return [list(model.state_dict().items()), list(optimizer.state_dict()["state"].values())]


ALL_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
TRAININGS: dict[str, dict[str, Any]] = {
    "no_named_parameters": {"named_parameters": None},
    "backward_passes_per_step": {"passes": 2, "backward_passes_per_step": 2},
    "gradient_predivide_factor": {"gradient_predivide_factor": 2.0},
    "optimizer_sum": {"op": "Sum"},
    "optimizer_fp16": {"compression": "fp16"},
    "groups_number": {"groups": 2},
    "groups_lists": {"groups": "lists"},
}


def training(hvd: Any, **options: Any) -> list[Any]:
    for name, owner in (("op", hvd), ("compression", hvd.Compression)):
        if name in options:
            options[name] = getattr(owner, options[name])
    return trained(hvd, **options)


CASES |= {name: partial(training, **options) for name, options in TRAININGS.items()}


@case
def force_allreduce(hvd: Any) -> list[Any]:
    """Train with each optimizer where one rank has no gradients of a layer."""
    kinds = [getattr(torch.optim, name) for name in ALL_OPTIMIZERS]
    return [trained(hvd, kind, last=hvd.rank() != 0) for kind in kinds]


@case
def optimizer_process_sets(hvd: Any) -> list[Any]:
    with process_set(hvd) as ranks:
        return trained(hvd, process_set=ranks)


@case
def optimizer_no_named_parameters(hvd: Any) -> list[Any]:
    """Parameters of two groups are told apart without names."""
    model = net(hvd, lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    groups: Any = [{"params": layer.parameters()} for layer in model.children()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
    model(batch(hvd)).square().mean().backward()
    optimizer.step()
    return list(model.state_dict().items())


@case
def broadcast_state(hvd: Any) -> list[Any]:
    """Give what rank 0 has loaded into its model and optimizer to all others."""
    done = []
    for name in ALL_OPTIMIZERS:
        kind, model, earlier = getattr(torch.optim, name), net(hvd), net(hvd)
        optimizer = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.2), model.named_parameters())
        if hvd.rank() == 0:
            alone = kind(earlier.parameters(), lr=0.3)
            earlier(batch(hvd)).sum().backward()
            alone.step()
            model.load_state_dict(earlier.state_dict())
            optimizer.load_state_dict(alone.state_dict())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        # Before the next call, in which Horovod's steps of ranks without a state decay their weights.
        done.append([value.clone() for value in model.state_dict().values()])
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        done.append(list(optimizer.state_dict()["state"].values()))
    return done


@case
def broadcast_state_options(hvd: Any) -> list[Any]:
    """Options of param groups become rank 0's, and keep their types."""
    done = []
    main = hvd.rank() == 0
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.1 if main else 0.2, "momentum": 0.8 if main else 0.9, "nesterov": main}),
        (torch.optim.Adam, {"lr": 0.1 if main else 0.2, "betas": (0.9, 0.99) if main else (0.8, 0.9)}),
        (torch.optim.Rprop, {"etas": (0.8, 2.4) if main else (0.2, 1.7), "step_sizes": (1e-5, 100 if main else 5)}),
    ):
        model = net(hvd)
        optimizer = hvd.DistributedOptimizer(kind(model.parameters(), **options), model.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        done += [group, {name: type(value).__name__ for name, value in group.items()}]
    return done


@case
def broadcast_state_no_grad(hvd: Any) -> list[Any]:
    """A parameter without gradients, of another type, is broadcast and left alone."""
    a = nn.Parameter(torch.tensor([hvd.rank(), 3], dtype=torch.int32), requires_grad=False)
    b = nn.Parameter(torch.rand(4))
    optimizer = torch.optim.SGD([a, b], lr=0.001, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("a", a), ("b", b)])
    hvd.broadcast_parameters([("a", a), ("b", b)], root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return [a.detach(), a.grad is None, hvd.allgather(b.detach()).reshape(-1, 4).unique(dim=0).shape]


@case
def duplicate_names(hvd: Any) -> str:
    named = [("weight", nn.Parameter(torch.ones(2))), ("weight", nn.Parameter(torch.ones(2)))]
    return raised(lambda: hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=0.1), named))


@case
def missing_named_parameters(hvd: Any) -> str:
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return raised(lambda: hvd.DistributedOptimizer(optimizer, list(model.named_parameters())[:1]))


@case
def dynamic_requires_grad(hvd: Any) -> list[Any]:
    """Train two networks in turn, whose parameters need gradients in turn."""
    one, other = net(hvd, lambda: nn.Linear(6, 4)), net(hvd, lambda: nn.Linear(4, 1))
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(prefix=name))
        for name, model in (("one", one), ("other", other))
    ]
    for step in range(4):
        one.requires_grad_(step % 2 == 0)
        other.requires_grad_(step % 2 == 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        other(one(batch(hvd, step))).sum().backward()
        optimizers[step % 2].step()
    return [list(one.state_dict().values()), list(other.state_dict().values())]


def clipped(hvd: Any, skip: bool) -> list[Any]:
    """Clip averaged gradients; a second average warns."""
    model = net(hvd)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(batch(hvd)).square().mean().backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if skip:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return [list(model.state_dict().values()), ["skip_synchronize" in str(one.message) for one in said]]


CASES |= {"gradient_clipping": partial(clipped, skip=True), "synchronize_step_warning": partial(clipped, skip=False)}


@case
def zero_grad_too_early(hvd: Any) -> list[Any]:
    model = net(hvd)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(batch(hvd)).square().mean().backward()
    kind = raised(optimizer.zero_grad)
    optimizer.step()
    return [kind, list(model.state_dict().values())]


@case
def backward_too_often(hvd: Any) -> list[Any]:
    model = net(hvd)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(batch(hvd)).square().mean().backward()
    kind = raised(lambda: model(batch(hvd, 1)).square().mean().backward())
    optimizer.synchronize()
    return [kind]


@case
def sparse_embeddings(hvd: Any) -> list[Any]:
    done = []
    rows = torch.tensor([[1, 2, 4, 5], [4, 3, 2, 9]] if hvd.rank() == 0 else [[1, 3, 4], [4, 7, 9]])
    for as_dense in (False, True):
        model = net(hvd, lambda: nn.Embedding(10, 3, sparse=True))
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=as_dense)
        model(rows).sum().backward()
        optimizer.step()
        done.append(model.state_dict()["weight"])
    return done


# ------------------------------------------------------------------------------------------------------------- elastic


@case
def elastic_state(hvd: Any) -> list[Any]:
    """Save, change and restore a model, an optimizer and numbers; ``sync`` takes rank 0's."""
    model = net(hvd)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + hvd.rank(), momentum=0.9)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=hvd.rank(), batch=0)
    state.epoch += 1
    state.save()
    model(batch(hvd)).sum().backward()
    optimizer.step()
    state.epoch, state.batch = 7, 5
    state.restore()
    restored = [state.epoch, state.batch, [value.clone() for value in model.state_dict().values()]]
    state.sync()
    return [*restored, state.epoch, optimizer.param_groups[0]["lr"]]


@case
def elastic_sampler(hvd: Any) -> list[Any]:
    sampler = hvd.elastic.ElasticSampler(list(range(23)), shuffle=True, seed=3)
    done = [list(sampler), len(sampler)]
    sampler.record_batch(0, 4)
    other = hvd.elastic.ElasticSampler(list(range(23)), shuffle=True, seed=3)
    other.load_state_dict(sampler.state_dict())
    done += [list(other), len(other)]
    other.set_epoch(1)
    return [*done, list(other)]


@case
def elastic_run(hvd: Any) -> list[Any]:
    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> int:
        for state.batch in range(3):
            state.commit()
        return int(state.batch)

    return [train(hvd.elastic.TorchState(model=net(hvd), batch=0))]
