"""``gather``: the rows of all ranks in one, through nested structures, though ranks have different numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unitrain.communication.communicator import Communicator, communicable
from unitrain.communication.structure import rebuilt, refilled
from unitrain.errors import UsageError, by_rank
from unitrain.rng import derived_seed


def gather(
    ranks: Communicator, value: Any, *, has_rows: bool, differentiable: bool, positions: Tensor | None = None
) -> Any:
    """See ``Strategy.gather``. Collective.

    It begins with a small exchange: the ranks compare what they give and learn how many rows each has. If that is
    not enough (objects, several numbers of rows, differences), a second one holds what each rank gives.

    Args:
        ranks: those that gather.
        value: this rank's rows.
        has_rows: whether they count. A stand-in's don't.
        differentiable: pass gradients back to each rank's rows.
        positions: of this rank's rows, by which the rows of all ranks are sorted. Negative ones are of stand-ins,
            whose rows don't count, and may have been left out.
    """
    leaves: list[Any] = []
    misfit = (0, 0)

    def take(leaf: Any) -> str:
        nonlocal misfit
        rows = _in_rows(leaf, has_rows=has_rows, differentiable=differentiable)
        if positions is not None and len(rows) == len(positions):
            rows = _picked(rows, (positions >= 0).nonzero()[:, 0])
        elif positions is not None and len(rows) != int((positions >= 0).sum()):
            misfit = len(rows), len(positions)
        leaves.append(rows)
        return _form(rows)

    # Lists are leaves, since their lengths may differ between ranks.
    form = repr(rebuilt(value, take, closed=list))
    if positions is not None:
        leaves.append(positions[positions >= 0])
        form += " in order"
    gathered = _gather(ranks, leaves, form, misfit)
    if positions is not None:
        order = gathered.pop().argsort()
        gathered = [_picked(rows, order) for rows in gathered]
    parts = iter(gathered)
    return rebuilt(value, lambda leaf: next(parts), closed=list)


def _gather(ranks: Communicator, leaves: list[Any], form: str, misfit: tuple[int, int]) -> list[Any]:
    """Return the rows of all ranks for each leaf.

    Args:
        ranks: those that gather.
        leaves: tensors with rows in their first dimension, and lists.
        form: a description of the whole, which must be the same on all ranks.
        misfit: the number of rows of a leaf that has too few or too many, and the number that it needs.
    """
    counts = {len(leaf) if isinstance(leaf, Tensor) else -1 for leaf in leaves}  # -1 is unknown
    facts = [derived_seed(form) >> 1, counts.pop() if len(counts) == 1 else -1, *misfit]
    every = ranks.collectives.all_gather(torch.tensor(facts, device=ranks.device))
    digests, rows, given, needed = every.T.tolist()
    if given != needed:
        rank = next(rank for rank in range(len(given)) if given[rank] != needed[rank])
        raise UsageError(
            f"gather got {given[rank]} rows for {needed[rank]} samples of the loader of in_order= on rank {rank}: "
            "in the loop over it, pass a row for each sample of its last batch, and after it, of all batches."
        )
    if len(set(digests)) == 1 and min(rows) >= 0:
        return [differentiable_rows(ranks, leaf, rows) for leaf in leaves]
    shapes = [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    descriptions = ranks.all_gather_object([form, *shapes])
    forms = [form for form, *_ in descriptions]
    if len(set(forms)) > 1:
        raise UsageError(
            f"gather needs the same structure, dtypes and row shapes on all ranks, but got {by_rank(enumerate(forms))}."
        )
    return [
        differentiable_rows(ranks, leaf, [shape[0] for shape in given])
        if isinstance(leaf, Tensor)
        else refilled(leaf, [row for rows in given for row in rows])
        for leaf, *given in zip(leaves, *(shapes for _, *shapes in descriptions), strict=True)
    ]


def differentiable_rows(communicator: Communicator, tensor: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the rows of all ranks' tensors, as ``gather_rows``, with a gradient if this rank's rows have one."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return cast(Tensor, _Rows.apply(tensor, counts, communicator))
    return gather_rows(communicator, tensor, counts)


def gather_rows(communicator: Communicator, tensor: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the rows of all ranks' tensors, in rank order. Collective.

    Args:
        communicator: the communicator of this process.
        tensor: this rank's rows, of the same dtype and row shape on all ranks.
        counts: number of rows of each rank.

    Raises:
        UsageError: the tensor is sparse or sharded.
    """
    work = communicable(communicator, tensor, "gather")
    row = work.shape[1:]
    if communicator.world_size > 1 and sum(counts) * row.numel():
        sizes = [count * row.numel() for count in counts]
        parts = communicator.collectives.all_gather_padded(work.reshape(-1), sizes)
        work = torch.cat(parts).view(sum(counts), *row)
    return work.to(tensor.device)


def _form(leaf: Any) -> str:
    """Return the description of a tensor or a list in a structure."""
    if not isinstance(leaf, Tensor):
        return "list"
    rest = "".join(f", {size}" for size in leaf.shape[1:])
    return f"{str(leaf.dtype).removeprefix('torch.')}[rows{rest}]"


class _Rows(torch.autograd.Function):
    """``gather_rows``. In the backward, each rank gets the sum of all ranks' gradients of its rows."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, counts: Sequence[int], communicator: Communicator) -> Tensor:
        ctx.first, ctx.count = sum(counts[: communicator.rank]), counts[communicator.rank]
        ctx.communicator = communicator
        return gather_rows(communicator, leaf, counts)

    @staticmethod
    @once_differentiable  # a second derivative would be wrong: autograd does not see the all-reduce
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Libraries can't reduce complex tensors.
        real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
        rows = ctx.communicator.all_reduce(real)[ctx.first : ctx.first + ctx.count]
        return torch.view_as_complex(rows) if grad.is_complex() else rows, None, None


def _picked(rows: Any, index: Tensor) -> Any:
    """Return the rows of a tensor or a list at these indices."""
    if isinstance(rows, Tensor):
        return rows[index.to(rows.device)]
    return refilled(rows, [rows[i] for i in index.tolist()])


def _in_rows(leaf: Any, *, has_rows: bool, differentiable: bool) -> Any:
    """Return a leaf as a tensor with rows, or as a list. With ``differentiable``, a tensor requires grad if it can."""
    if isinstance(leaf, Tensor):
        tensor = leaf if leaf.dim() else leaf.unsqueeze(0)  # a scalar is a row
        if not differentiable or not (tensor.requires_grad or tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.detach()
        elif not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()  # all ranks take part in the backward, or none
        return tensor if has_rows else tensor[:0]  # which has the dtype and row shape that ranks compare
    rows = leaf if isinstance(leaf, list) else [leaf]
    if differentiable and any(isinstance(row, Tensor) and row.requires_grad for row in rows):
        raise UsageError(
            "gather can't pass gradients back to tensors in a list: concatenate them, or pass them in a tuple."
        )
    return rows if has_rows else refilled(rows, [])
