"""``DistributedOptimizer``: reduces gradients in the core's buckets while the backward still runs.

Buckets are made in the first step, once the ranks have compared what they train. From then on each bucket is sent by a
communicator that nothing else uses. So what ranks call between the backward and the step can't meet a bucket, even if
their losses use different parameters. In ``step`` the ranks meet in the round of the other operations: they find out
there if one has not come, or has joined.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import difference_between_ranks
from unitrain.communication.state_transfer import SentState, broadcast_tensors, outline
from unitrain.compat.horovod.collectives import Average, Compression, Compressor, Sum, reduce, reduce_sparse
from unitrain.compat.horovod.process_sets import HorovodInternalError, ProcessSet, global_process_set
from unitrain.errors import UsageError
from unitrain.training.gradients.gradients import GradientReducer

_VERB = "DistributedOptimizer"
_of_all_ranks: weakref.WeakValueDictionary[str, DistributedOptimizer] = weakref.WeakValueDictionary()


class DistributedOptimizer(Optimizer):
    """An optimizer that reduces the gradients over the ranks before each step.

    It is of a subclass of the optimizer's class, too, and shares its parameter groups and its state.

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
        process_set: the ranks to reduce over. Other ranks train alone.

    Raises:
        UsageError: ``op`` or ``compression`` is another one.
        ValueError: another argument is wrong, or parameters have no name, or one that is not unique.
    """

    def __init__(
        self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        compression: Compressor = Compression.none, backward_passes_per_step: int = 1, op: int = Average,
        gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None, sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:  # fmt: skip
        if op not in (Average, Sum) or compression not in (Compression.none, Compression.fp16):
            raise UsageError("DistributedOptimizer has no Adasum: use op=hvd.Average; and compression none or fp16.")
        if gradient_predivide_factor != 1.0 and op != Average:
            raise ValueError("gradient_predivide_factor is a part of a mean, and op is not Average: leave it at 1.")
        kind = type(optimizer)
        self.__class__ = type(kind.__name__, (DistributedOptimizer, kind), {"__module__": kind.__module__})
        # A scheduler puts another step() into the object.
        vars(self).update({name: value for name, value in vars(optimizer).items() if name != "step"})
        self.backward_passes_per_step: int = backward_passes_per_step
        self.process_set: ProcessSet = process_set
        self._op, self._factor = op, gradient_predivide_factor
        self._wire_dtype, self._sparse_as_dense = compression.dtype, sparse_as_dense
        self._names = _names(optimizer, named_parameters)
        self._passes: Counter[nn.Parameter] = Counter()  # backwards since the last step
        self._reducer: GradientReducer | None = None
        self._synchronized = self._skips = False
        self._reduces = process_set.included() is not False and process_set.communicator.world_size > 1
        self._name = process_set.next_name(_VERB)
        if process_set is global_process_set:
            _of_all_ranks[f"{_VERB}.{self._name}"] = self
        this = weakref.proxy(self)  # an optimizer that the script has dropped reduces nothing
        for p in self._names if self._reduces else ():
            hook = p.register_post_accumulate_grad_hook(lambda p: this._count(p))  # type: ignore[no-untyped-call]
            weakref.finalize(self, hook.remove)

    def _count(self, p: nn.Parameter) -> None:
        """Count a gradient, before the buckets do."""
        self._passes[p] += 1
        if self._passes[p] > self.backward_passes_per_step:
            raise AssertionError(f"{self._names[p]} has too many gradients: raise backward_passes_per_step.")

    def _make_reducer(self, ranks: Communicator) -> GradientReducer:
        """Put the parameters into buckets, once the ranks have agreed on them. Collective."""
        check_same(ranks, _VERB, [(name, p) for p, name in self._names.items()])
        is_sparse = torch.tensor([float(p.grad is not None and p.grad.is_sparse) for p in self._names])
        flags = ranks.all_reduce(is_sparse, "max").tolist()
        self._sparse = [p for p, flag in zip(self._names, flags, strict=True) if flag]
        dense = [p for p, flag in zip(self._names, flags, strict=True) if not flag]
        this = weakref.proxy(self)
        reducer = GradientReducer(
            dense, ranks.twin().collectives, armed=lambda p: this._passes[p] == this.backward_passes_per_step,
            name=self._name, wire_dtype=self._wire_dtype, divisor=self._factor,
        )  # fmt: skip
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
                p.grad = reduce(ranks, p.grad.to_dense(), self._op).to_sparse(1)
            else:
                p.grad = reduce_sparse(ranks, p.grad if p.grad.is_sparse else p.grad.to_sparse(1), self._op)
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
            raise UsageError("parameters that are new, or were frozen, are not reduced: wrap the optimizer later.")
        if self._reduces:
            self.process_set.call(_VERB, self._name, (), self.reduce_gradients)

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
        if not self._skips:
            if closure is not None:
                raise UsageError(
                    "gradients of step(closure) are not reduced: call synchronize() in it, within skip_synchronize()."
                )
            if self._synchronized:
                warnings.warn("step() after synchronize() reduces again: use skip_synchronize().", stacklevel=2)
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch calls hooks in the original's, and would here, too

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. AssertionError if some were computed that no step has used."""
        if self._passes:
            raise AssertionError("gradients are being reduced: call zero_grad() before backward(), or after step().")
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate the gradients of this many backwards from now on."""
        self.backward_passes_per_step = passes


ProcessSet.stand_ins[_VERB] = lambda ranks, name, form: _of_all_ranks[name].reduce_gradients(ranks, joined=True)


def _names(optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]] | None) -> dict[nn.Parameter, str]:
    """Return the names of the parameters of an optimizer that are trained. ValueError unless each has a unique one."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = {p: str(name) for name, p in (enumerate(parameters) if named is None else named)}
    if len(set(names.values())) < len(names) or not names.keys() >= set(parameters):
        raise ValueError("named_parameters needs a name for each parameter of the optimizer, and different ones.")
    return {p: names[p] for p in parameters if p.requires_grad}


def broadcast_parameters(params: dict[str, Tensor] | Iterable[Any], root_rank: int) -> None:
    """Overwrite tensors with a rank's, in place. Collective.

    Args:
        params: a state dict, tensors, or pairs of a name and a tensor.
        root_rank: the rank that has the values.

    Raises:
        HorovodInternalError: the ranks have other tensors; on every rank.
    """
    items = sorted(params.items()) if isinstance(params, dict) else params
    named = [item if isinstance(item, tuple) else (f"number {i}", item) for i, item in enumerate(items)]

    def send(communicator: Communicator) -> None:
        check_same(communicator, "broadcast_parameters", named)
        tensors = [tensor for _, tensor in named]
        broadcast_tensors(communicator, tensors, tensors, src=root_rank)

    global_process_set.call("broadcast_parameters", None, (root_rank,), send)


def check_same(communicator: Communicator, caller: str, named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise HorovodInternalError on all ranks unless they have tensors of the same names and forms. Collective.

    Args:
        communicator: the communicator of this process.
        caller: the function to name.
        named: the tensors, with their names.
    """
    facts = {str(name): f"{str(tensor.dtype)[6:]}{list(tensor.shape)}" for name, tensor in named}
    if differing := difference_between_ranks(communicator, {**facts, "order": list(facts)}):
        raise HorovodInternalError(f"{caller}: tensor {differing[0]} is {differing[1]}: all ranks must have the same.")


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Overwrite the state and the options of an optimizer with a rank's. Collective.

    An optimizer that has no state yet makes a step with gradients of zero before, as with Horovod: such gradients stay,
    Adam has counted a step, and weight decay has changed the weights. If only other ranks than the root have none, it
    makes no such step, and they get the root's state.

    Args:
        optimizer: the optimizer, distributed or not.
        root_rank: the rank that has the state.
        model: has no effect.
    """

    def send(communicator: Communicator) -> None:
        if communicator.broadcast_data(not optimizer.state, root_rank) and not optimizer.state:
            _step_without_gradients(optimizer)
        # Tensors go straight into their places, in small buffers.
        groups, state = optimizer.param_groups, optimizer.state_dict()
        form = communicator.broadcast_object(outline(state), root_rank)
        SentState(communicator, form, state, root_rank).load_into(optimizer)
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = groups  # the same dicts: the optimizer that was wrapped, and its scheduler, have them

    global_process_set.call("broadcast_optimizer_state", None, (root_rank,), send)


def _step_without_gradients(optimizer: Optimizer) -> None:
    """Let an optimizer make its state, by a step with gradients of zero. Not collective."""
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        zeros = torch.zeros_like(p)
        p.grad = zeros.to_sparse(1) if isinstance(optimizer, SparseAdam) else zeros
    with getattr(optimizer, "skip_synchronize", nullcontext)():
        optimizer.step()
