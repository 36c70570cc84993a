"""``DistributedOptimizer``: reduces gradients in flat buckets while the backward still runs.

Buckets are made in the first step, once the ranks have compared what they train. From then on hooks of the parameters
send each bucket as soon as it and those before it are full, by a communicator that nothing else uses. So what ranks
call between the backward and the step can't meet a bucket, even if their losses use different parameters. In ``step``
the ranks meet in the queue of the other operations: they find out there if one has not come, or has joined.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast
from weakref import WeakMethod, WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.compat.horovod.collectives import Average, Max, Min, Sum, allreduce, sparse_allreduce_async
from unitrain.compat.horovod.compression import Compression, Compressor
from unitrain.compat.horovod.functions import check_same
from unitrain.compat.horovod.matching import Form, HorovodInternalError, Operation
from unitrain.compat.horovod.operations import STAND_INS
from unitrain.compat.horovod.process_sets import ProcessSet, global_process_set
from unitrain.errors import UsageError
from unitrain.training.gradients.gradients import in_buckets

OptimizerType = TypeVar("OptimizerType", bound=Optimizer)
_BUCKET_BYTES = 25 * 2**20  # as in the core
_OPS = {Average: "sum", Sum: "sum", Min: "min", Max: "max"}
_of_all_ranks: WeakValueDictionary[str, Distributed] = WeakValueDictionary()


class _Bucket:
    """Gradients of one dtype and device, which are sent as a flat tensor.

    ``missing`` is the number of gradients that the backward has not computed yet.
    """

    finish: Callable[[], Iterable[tuple[Parameter, Tensor]]]
    """Waits for the results, and returns the parameters with their gradients, which are views of the flat tensor."""

    def __init__(self, parameters: list[Parameter], name: str) -> None:
        self.parameters, self.name, self.missing = parameters, name, len(parameters)
        self._ends = torch.tensor([0, *(p.numel() for p in parameters)]).cumsum(0).tolist()
        # As the parameters have them (channels_last, say), which optimizers' fast paths need.
        self._strides = [torch.empty_like(p, device="meta").stride() for p in parameters]

    def launch(self, optimizer: Distributed, joined: bool) -> None:
        """Start to reduce the gradients, with zeros for those that this rank does not have."""
        ranks, compression = optimizer.communicator, optimizer.compression
        gradients = [torch.zeros_like(p) if p.grad is None or joined else p.grad.to_dense() for p in self.parameters]
        sent, contexts = zip(*map(compression.compress, gradients), strict=True)
        flat = sent[0].new_empty(self._ends[-1])  # a new one: the script may keep gradients of the last step
        places = zip(self.parameters, self._strides, self._ends, strict=False)
        views = [flat.as_strided(p.size(), stride, offset) for p, stride, offset in places]
        factor = 1 / optimizer.gradient_predivide_factor  # before the sum, and after it
        after = 1 / factor / (ranks.world_size if optimizer.op == Average else 1)
        if math.frexp(after)[0] == 0.5 and flat.dtype in (torch.float32, torch.float64):
            factor, after = factor * after, 1.0  # a power of two gives the same result before the sum, without a pass
        for view, tensor in zip(views, sent, strict=True):
            torch.mul(tensor, factor, out=view)
        wire = flat.to(ranks.device)
        wait = ranks.collectives.all_reduce_async(wire, _OPS[optimizer.op], self.name)

        def finish() -> Iterable[tuple[Parameter, Tensor]]:
            wait()
            if wire is not flat:
                flat.copy_(wire)
            if after != 1:
                flat.mul_(after)
            self.missing, self.finish = len(self.parameters), tuple  # keep nothing
            return zip(self.parameters, map(compression.decompress, views, contexts), strict=True)

        self.finish = finish


class Distributed(Optimizer):
    """The part that ``DistributedOptimizer`` adds to an optimizer's class. Its arguments are attributes."""

    backward_passes_per_step: int
    op: int
    gradient_predivide_factor: float
    process_set: ProcessSet
    sparse_as_dense: bool
    compression: type[Compressor]
    communicator: Communicator

    def distribute(
        self, names: dict[Parameter, str], compression: type[Compressor], passes: int, op: int, factor: float,
        sparse_as_dense: bool, process_set: ProcessSet,
    ) -> None:  # fmt: skip
        """Begin to reduce gradients. ValueError if the process set is not registered."""
        self.backward_passes_per_step, self.op, self.gradient_predivide_factor = passes, op, factor
        self.process_set, self.sparse_as_dense, self.compression = process_set, sparse_as_dense, compression
        self._names = names
        self._passes: dict[Parameter, int] = {}  # backwards since the last step
        self._trained: list[Parameter] = []
        self._sparse: set[Parameter] = set()
        self._hooked: set[Parameter] = set()
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Parameter, _Bucket] = {}
        self._next = self._layouts = 0
        self._synchronized = self._skips = False
        self._reduces = False  # ranks that are not in the process set train alone
        if process_set.included() is not False:
            queue = process_set.queue()  # ValueError unless it is registered
            self._name = queue.name("DistributedOptimizer")
            self._reduces = queue.communicator.world_size > 1
            if process_set is global_process_set:
                _of_all_ranks[self._name] = self
        self._watch()

    def _watch(self) -> list[Parameter]:
        """Return the parameters that are trained, which have hooks from now on."""
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        ready = WeakMethod(self._ready)  # an optimizer that the script has dropped reduces nothing
        for p in trained if self._reduces else ():
            if p not in self._hooked:
                self._hooked.add(p)
                p.register_post_accumulate_grad_hook(lambda p: (call := ready()) and call(p))
        return trained

    def _ready(self, p: Parameter) -> None:
        """Take notice of a gradient, and start to reduce the buckets that are full with it."""
        passes = self._passes[p] = self._passes.get(p, 0) + 1
        if passes > self.backward_passes_per_step:
            raise AssertionError(
                f"the gradient of {self._names.get(p, 'a parameter')} was computed {passes} times before step(), but "
                f"backward_passes_per_step is {self.backward_passes_per_step}: raise it, to accumulate gradients."
            )
        if passes == self.backward_passes_per_step and p in self._bucket_of:
            self._bucket_of[p].missing -= 1
            self._launch(rest=False)

    @torch.no_grad()
    def _launch(self, *, rest: bool = True, joined: bool = False) -> None:
        """Start to reduce the buckets that are full, and with ``rest`` the others, in the same order on every rank."""
        while self._next < len(self._buckets) and (rest or not self._buckets[self._next].missing):
            self._buckets[self._next].launch(self, joined)
            self._next += 1

    def operation(self, *, joined: bool = False) -> Operation:
        """Return the operation by which the ranks meet in a step. If this rank has ``joined``, it sends zeros."""
        trained = self._watch()
        changed = list(map(id, trained)) != list(map(id, self._trained))

        def start(communicator: Communicator, *_: Any) -> Callable[[], list[Any]]:
            if changed:
                self._launch(joined=joined)  # some ranks may have launched some
                for bucket in self._buckets:
                    bucket.finish()
                self._layout(communicator, trained)
            self._launch(joined=joined)
            if joined:
                self._finish(joined=True)  # nobody waits for it
            return self._finish

        return Operation(self._name, ("DistributedOptimizer.step", self._layouts + changed), start)

    def _layout(self, communicator: Communicator, trained: list[Parameter]) -> None:
        """Divide the parameters into buckets, once the ranks have agreed on them. Collective."""
        named = [(self._names.get(p, f"number {i}"), p) for i, p in enumerate(trained)]
        check_same(communicator, "DistributedOptimizer", named)
        is_sparse = torch.tensor([float(p.grad is not None and p.grad.is_sparse) for p in trained])
        self._sparse = {p for p, flag in zip(trained, communicator.all_reduce(is_sparse, "max"), strict=True) if flag}
        if not self._layouts:
            self.communicator = communicator.twin()
        self._trained, self._layouts, self._next = trained, self._layouts + 1, 0
        dense = [p for p in trained if self.sparse_as_dense or p not in self._sparse]
        self._buckets = [
            _Bucket(parameters, f"{self._name}.{i}") for i, parameters in enumerate(in_buckets(dense, _BUCKET_BYTES))
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}

    def _finish(self, joined: bool = False) -> list[Any]:
        """Wait for the buckets, and set the gradients, unless this rank has joined."""
        for bucket in self._buckets:
            for p, gradient in bucket.finish():
                if not joined:
                    p.grad = gradient.to_sparse(1) if p in self._sparse else gradient
        self._next = 0
        # Only now may the backward of the next step count again.
        self._passes.clear()
        return [None]

    @torch.no_grad()
    def synchronize(self) -> None:
        """Complete the reduction of the gradients, of all parameters: those without a gradient get zeros. Collective.

        Raises:
            HorovodInternalError: the ranks don't train the same parameters, or make other calls.
        """
        self._synchronized = True
        if not self._reduces:
            return
        queue, operation = self.process_set.queue(), self.operation()
        queue.submit(operation)
        queue.finish(operation)
        for p in self._trained:
            if p in self._sparse and not self.sparse_as_dense:
                gradient = p.grad if p.grad is not None else torch.zeros_like(p).to_sparse(1)
                p.grad = sparse_allreduce_async(gradient, self._name, self.op, self.process_set)()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context manager that lets ``step`` take the gradients as they are, after ``synchronize``."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, and make a step. Collective.

        Args:
            closure: computes the loss and the gradients. They are reduced each time that it is called, and so is the
                loss that it returns, so that all ranks make the same step.
        """
        if self._synchronized and not self._skips:
            warnings.warn(
                "optimizer.step() reduces the gradients that optimizer.synchronize() has reduced once more: call it "
                "within optimizer.skip_synchronize().",
                stacklevel=2,
            )

        def reduced() -> Any:
            loss = closure and closure()
            if not self._skips:
                self.synchronize()
                if self._reduces and isinstance(loss, Tensor):
                    loss = allreduce(loss.detach(), name=self._name, op=self.op, process_set=self.process_set)
            self._synchronized = False
            return loss

        if closure:
            return super().step(reduced)
        reduced()
        return super().step()

    step.hooked = True  # type: ignore[attr-defined]  # torch calls hooks in the original's, and would here, too

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. AssertionError if some were computed that no step has used."""
        if self._passes:
            raise AssertionError(
                "optimizer.zero_grad() was called between loss.backward() and optimizer.step() or "
                "optimizer.synchronize(), while gradients are being reduced: call it before the backward."
            )
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate the gradients of this many backwards from now on."""
        self.backward_passes_per_step = passes


def _stand_in(name: str, form: Form) -> Operation:
    """Return the operation by which a rank that has joined takes part in the step of an optimizer."""
    if name not in _of_all_ranks:
        raise HorovodInternalError(
            f"another rank makes a step of {name!r}, which this rank, which has joined, has no more: keep "
            "the optimizer until hvd.join() returns."
        )
    return _of_all_ranks[name].operation(joined=True)


STAND_INS["DistributedOptimizer.step"] = _stand_in


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: OptimizerType, named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: type[Compressor] = Compression.none, backward_passes_per_step: int = 1, op: int = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None, sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> OptimizerType:  # fmt: skip
    """Return an optimizer that reduces the gradients over the ranks before each step.

    It is of a subclass of the optimizer's class, and shares its parameter groups and its state.

    Args:
        optimizer: the optimizer.
        named_parameters: the names of all parameters, for messages: ``model.named_parameters()``.
        compression: changes gradients before they are sent, and back. It must keep their shapes.
        backward_passes_per_step: the number of backwards before each step; their gradients are added up.
        op: Average, Sum, Min or Max.
        gradient_predivide_factor: a part of the size that Average divides by before the sum, and not after it.
        num_groups: has no effect.
        groups: has no effect: gradients are always sent in groups, of 25 MiB.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks to reduce over.

    Raises:
        UsageError: ``op`` is another one.
        ValueError: another argument is wrong, or parameters have no name, or one that is not unique.
    """
    if op not in _OPS:
        raise UsageError("DistributedOptimizer supports op Average, Sum, Min and Max, not Adasum: use hvd.Average.")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor is a part of a mean, and op is not Average: leave it at 1.")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}, but must be at least 1.")
    members = [p for group in groups for p in group] if isinstance(groups, list) else []
    if not all(isinstance(p, Tensor) for p in members) or len({id(p) for p in members}) < len(members):
        raise ValueError("groups must be a number, or lists of parameters, each in only one of them.")
    names, kind = _names(optimizer, named_parameters), type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (Distributed, kind), {"__module__": kind.__module__}))
    # A scheduler puts another step() into the object.
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made.distribute(
        names, compression, backward_passes_per_step, op, gradient_predivide_factor, sparse_as_dense, process_set
    )
    return cast(OptimizerType, made)


def _names(optimizer: Optimizer, named: Iterable[tuple[str, Parameter]] | None) -> dict[Parameter, str]:
    """Return the names of an optimizer's parameters.

    ValueError if there are names, but not of all, or not unique, or if they are no pairs.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    pairs = [(f"number {i}", p) for i, p in enumerate(parameters)] if named is None else list(named)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters must be pairs of a name and a parameter: pass model.named_parameters().")
    names, by_name = {p: name for name, p in pairs}, dict(pairs)
    if twice := sorted({name for name, p in pairs if by_name[name] is not p}):
        raise ValueError(f"named_parameters has the same name for several parameters: {', '.join(twice)}.")
    if unnamed := [tuple(p.shape) for p in parameters if p not in names]:
        raise ValueError(f"named_parameters lacks parameters of the optimizer, of the shapes {unnamed}: name all.")
    return names
