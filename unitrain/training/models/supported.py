"""Refuses modules, optimizers and schedulers that ``prepare`` and ``step`` do not support, with a remedy.

Every check raises UsageError, on all ranks, before anything has changed.
"""

from __future__ import annotations

import inspect
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from unitrain.errors import UsageError


def check_kind(candidate: object) -> None:
    """Raise UsageError if an object is neither a module nor an optimizer nor a scheduler."""
    if isinstance(candidate, (nn.Module, Optimizer)) or callable(getattr(candidate, "step", None)):
        return  # schedulers have no common base class: timm's, Hugging Face's
    raise UsageError(
        f"prepare() takes modules, optimizers and schedulers, not {type(candidate).__name__}: pass a dataset or a "
        "DataLoader to strategy.dataloader(...)."
    )


def check_module(module: nn.Module) -> None:
    """Raise UsageError if a module can't be prepared as it is: it has lazy layers, is wrapped or sharded already."""
    parameters = list(module.parameters())
    if any(is_lazy(p) for p in parameters):
        raise UsageError("the model has uninitialised lazy layers: run a forward with one batch first.")
    if any(isinstance(layer, (DataParallel, DistributedDataParallel)) for layer in module.modules()):
        raise UsageError("the model is wrapped in torch's DDP or DataParallel already: pass the module within.")
    # Sharded parameters are DTensors, or flat parameters of FSDP's first version.
    # By name, since importing torch's FSDP takes time that only its users should pay.
    flat = any(type(layer).__name__ == "FullyShardedDataParallel" for layer in module.modules())
    if flat or any(hasattr(p, "placements") for p in parameters):
        raise UsageError(
            "the model is sharded already, in part or whole: pass it as it was built. The backend fsdp shards it."
        )
    _check_memory(module)


def _check_memory(module: nn.Module) -> None:
    """Raise UsageError if a trained parameter has elements of another parameter or buffer.

    Moving, sharding or averaging a model treats them as two tensors.
    """
    sharing: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.numel():
            sharing.setdefault(id(tensor.untyped_storage()), []).append((name, tensor))
    for named in sharing.values():
        for (name, tensor), (other, another) in combinations(named, 2):
            if (tensor.requires_grad or another.requires_grad) and _overlap(tensor, another):
                raise UsageError(
                    f"{other} is another tensor than {name}, but in the same memory, where one is trained: preparing "
                    f"the model would part them. Let the layers share one Parameter, as in decoder.weight = "
                    "encoder.weight. If one is a transposed or another view, drop it, and compute the view in the "
                    "forward, as in torch.nn.functional.linear(x, encoder.weight.t())."
                )


def _overlap(tensor: Tensor, other: Tensor) -> bool:
    """Return whether the bytes of two tensors of one storage overlap. Parts of a flat tensor do not."""
    (start, end), (other_start, other_end) = map(_span, (tensor, other))
    return start < other_end and other_start < end


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where the bytes of a tensor begin and end in its storage."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def check_lookups(module: nn.Module) -> None:
    """Raise UsageError if a lookup changes weights. On several ranks, each would change the rows of its own samples.

    Called with several ranks only: a single process changes all rows.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise UsageError(
                f"{name or 'the model'} is an {type(layer).__name__} with max_norm, and each rank would change rows of "
                "its own samples: set max_norm to None, and bound the norms after strategy.step, under torch.no_grad()."
            )


def explain(error: BaseException, optimizer: Optimizer) -> None:
    """Raise UsageError in place of an error of an optimizer's step if that needs a closure."""
    if isinstance(error, TypeError) and "'closure'" in str(error):
        raise UsageError(
            f"{type(optimizer).__name__} evaluates the loss several times in a step, by a closure: call "
            "strategy.update(optimizer, closure=closure) in place of strategy.step. See the page on closures."
        ) from error


_schedulers: set[type[Any]] = set()  # classes that were checked


def check_scheduler(scheduler: Any) -> None:
    """Raise UsageError if a scheduler can't be stepped without arguments. Called before anything changes.

    A class is inspected once, since ``step`` calls this every time.
    """
    if type(scheduler) in _schedulers:
        return
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError:
        raise UsageError(
            f"step() can't step a {type(scheduler).__name__}, which needs a metric or an epoch: leave it out, and call "
            "scheduler.step(metric) after the evaluation, with the same metric on all ranks; or, for timm's, "
            "scheduler.step_update(strategy.global_step) where strategy.step(...).stepped is True."
        ) from None
    _schedulers.add(type(scheduler))
