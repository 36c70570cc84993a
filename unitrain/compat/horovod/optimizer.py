"""``DistributedOptimizer``: reduces gradients in the core's buckets while the backward still runs.

Buckets are made in the first step, once the ranks have compared what they train. From then on each bucket is sent by a
communicator that nothing else uses. So what ranks call between the backward and the step can't meet a bucket, even if
their losses use different parameters. In ``step`` the ranks meet in the queue of the other operations: they find out
there if one has not come, or has joined.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.compat.horovod.collectives import Average, Sum
from unitrain.compat.horovod.compression import Compression, Compressor
from unitrain.compat.horovod.functions import check_same
from unitrain.compat.horovod.matching import STAND_INS, Form, HorovodInternalError
from unitrain.compat.horovod.operations import OPS, reduce, reduce_sparse
from unitrain.compat.horovod.process_sets import ProcessSet, global_process_set
from unitrain.errors import UsageError
from unitrain.training.gradients.gradients import GradientReducer

OptimizerType = TypeVar("OptimizerType", bound=Optimizer)
_VERB = "DistributedOptimizer"
_WIRE_DTYPES = {Compression.none: None, Compression.fp16: torch.float16}
_of_all_ranks: weakref.WeakValueDictionary[str, Distributed] = weakref.WeakValueDictionary()


class Distributed(Optimizer):
    """The part that ``DistributedOptimizer`` adds to an optimizer's class."""

    backward_passes_per_step: int
    process_set: ProcessSet

    def distribute(
        self, names: dict[Parameter, str], process_set: ProcessSet, passes: int, op: int, factor: float,
        wire_dtype: torch.dtype | None, sparse_as_dense: bool,
    ) -> None:  # fmt: skip
        """Begin to reduce the gradients of parameters, which are all that are trained, and have names."""
        self.backward_passes_per_step, self.process_set = passes, process_set
        self._names, self._op, self._factor = names, op, factor
        self._wire_dtype, self._sparse_as_dense = wire_dtype, sparse_as_dense
        self._passes: dict[Parameter, int] = {}  # backwards since the last step
        self._sparse: list[Parameter] = []
        self._reducer: GradientReducer | None = None
        self._synchronized = self._skips = self._reduces = False
        if process_set.included() is False:
            return  # ranks that are not in the process set train alone
        queue = process_set.queue()  # ValueError unless it is registered
        self._name = queue.next_name(_VERB)
        self._reduces = queue.communicator.world_size > 1
        if process_set is global_process_set:
            _of_all_ranks[f"{_VERB}.{self._name}"] = self
        this = weakref.proxy(self)  # an optimizer that the script has dropped reduces nothing
        for p in names if self._reduces else ():
            hook = p.register_post_accumulate_grad_hook(lambda p: this._count(p))  # type: ignore[no-untyped-call]
            weakref.finalize(self, hook.remove)

    def _count(self, p: Parameter) -> None:
        """Count a gradient, before the buckets do."""
        passes = self._passes[p] = self._passes.get(p, 0) + 1
        if passes > self.backward_passes_per_step:
            raise AssertionError(
                f"the gradient of {self._names[p]} was computed {passes} times before step(), but "
                f"backward_passes_per_step is {self.backward_passes_per_step}: raise it, to accumulate gradients."
            )

    def _make_reducer(self, ranks: Communicator) -> GradientReducer:
        """Put the parameters into buckets, once the ranks have agreed on them. Collective."""
        check_same(ranks, _VERB, [(name, p) for p, name in self._names.items()])
        is_sparse = torch.tensor([float(p.grad is not None and p.grad.is_sparse) for p in self._names])
        flags = ranks.all_reduce(is_sparse, "max").tolist()
        self._sparse = [p for p, flag in zip(self._names, flags, strict=True) if flag]
        this = weakref.proxy(self)
        reducer = GradientReducer(
            [p for p, flag in zip(self._names, flags, strict=True) if not flag],
            ranks.twin().collectives,
            armed=lambda p: this._passes[p] == this.backward_passes_per_step,
            name=f"{_VERB}.{self._name}",
            wire_dtype=self._wire_dtype,
            divisor=self._factor,
        )
        weakref.finalize(self, reducer.close)
        return reducer

    @torch.no_grad()
    def reduce_gradients(self, ranks: Communicator, joined: bool = False) -> None:
        """Reduce the gradients, with zeros for those that this rank does not have, or has not, as it has joined."""
        self._reducer = self._reducer or self._make_reducer(ranks)
        for p in self._names:
            if joined or p.grad is None:
                p.grad = torch.zeros_like(p)
        self._reducer.finish()
        reduced = [p.grad for p in self._reducer.parameters if p.grad is not None]
        after = self._factor / ranks.world_size if self._op == Average else 1.0
        if after != 1 and reduced:
            torch._foreach_mul_(reduced, after)
        for p in self._sparse:
            assert p.grad is not None  # but may be dense: zeros
            if self._sparse_as_dense:
                p.grad = reduce(ranks, p.grad.to_dense(), OPS[self._op], 1.0, 1.0).to_sparse(1)
            else:
                p.grad = reduce_sparse(ranks, p.grad if p.grad.is_sparse else p.grad.to_sparse(1), OPS[self._op])
        for p in self._names:
            if joined or not p.requires_grad:
                p.grad = None
        # Only now may the backward of the next step count again.
        self._passes.clear()

    def synchronize(self) -> None:
        """Complete the reduction of the gradients, of all parameters: those without a gradient get zeros. Collective.

        Raises:
            HorovodInternalError: the ranks don't train the same parameters, or make other calls.
        """
        self._synchronized = True
        if any(p.requires_grad and p not in self._names for group in self.param_groups for p in group["params"]):
            raise UsageError(
                "parameters are trained that were frozen, or not there, when DistributedOptimizer was called, so that "
                "their gradients are not reduced: call it after that."
            )
        if self._reduces:
            self.process_set.queue().call(_VERB, self._name, (), self.reduce_gradients)

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
            closure: computes the loss and the gradients, and calls ``synchronize``, within ``skip_synchronize``.

        Raises:
            UsageError: the gradients of a closure would not be reduced.
        """
        if closure is not None and not self._skips:
            raise UsageError(
                "step(closure) would not reduce the gradients that the closure computes: compute them before, or let "
                "the closure call optimizer.synchronize(), within optimizer.skip_synchronize()."
            )
        if not self._skips:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() reduces the gradients that optimizer.synchronize() has reduced once more: call "
                    "it within optimizer.skip_synchronize().",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

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


def _reduce_zeros(ranks: Communicator, name: str, form: Form) -> None:
    if name not in _of_all_ranks:
        raise HorovodInternalError(
            f"another rank makes a step of {name!r}, which this rank, which has joined, has no more: keep the "
            "optimizer until hvd.join() returns."
        )
    _of_all_ranks[name].reduce_gradients(ranks, joined=True)


STAND_INS[_VERB] = _reduce_zeros


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
        compression: ``Compression.none`` or ``Compression.fp16``.
        backward_passes_per_step: the number of backwards before each step; their gradients are added up.
        op: Average or Sum.
        gradient_predivide_factor: a part of the size that Average divides by before the sum, and not after it.
        num_groups: has no effect.
        groups: has no effect: gradients are always sent in groups, of 25 MiB.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks to reduce over.

    Raises:
        UsageError: ``op`` or ``compression`` is another one.
        ValueError: another argument is wrong, or parameters have no name, or one that is not unique.
    """
    if op not in (Average, Sum) or compression not in _WIRE_DTYPES:
        raise UsageError(
            "DistributedOptimizer supports op Average and Sum, not Adasum: use hvd.Average; and compression none and "
            "fp16."
        )
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor is a part of a mean, and op is not Average: leave it at 1.")
    names, kind = _names(optimizer, named_parameters), type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (Distributed, kind), {"__module__": kind.__module__}))
    # A scheduler puts another step() into the object.
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made.distribute(
        names, process_set, backward_passes_per_step, op, gradient_predivide_factor, _WIRE_DTYPES[compression],
        sparse_as_dense,
    )  # fmt: skip
    return cast(OptimizerType, made)


def _names(optimizer: Optimizer, named: Iterable[tuple[str, Parameter]] | None) -> dict[Parameter, str]:
    """Return the names of the parameters of an optimizer that are trained.

    ValueError if there are names, but not of all parameters, or not unique.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    pairs = [(f"number {i}", p) for i, p in enumerate(parameters)] if named is None else list(named)
    names, by_name = {p: name for name, p in pairs}, dict(pairs)
    if twice := sorted({name for name, p in pairs if by_name[name] is not p}):
        raise ValueError(f"named_parameters has the same name for several parameters: {', '.join(twice)}.")
    if unnamed := [tuple(p.shape) for p in parameters if p not in names]:
        raise ValueError(f"named_parameters lacks parameters of the optimizer, of the shapes {unnamed}: name all.")
    return {p: names[p] for p in parameters if p.requires_grad}
