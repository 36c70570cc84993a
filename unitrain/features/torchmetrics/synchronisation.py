"""Synchronises torchmetrics' metrics over the ranks of any backend."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import zip_longest
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import unitrain
from unitrain.communication.communicator import Communicator
from unitrain.data.loop import CurrentBatch
from unitrain.errors import UsageError
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets

M = TypeVar("M")


def synchronise_metric(metric: M, strategy: unitrain.Strategy) -> M:
    """Make a torchmetrics ``Metric`` or ``MetricCollection`` synchronise on any backend, and return it.

    Its value then covers the samples of all ranks, though some may have none. Stand-ins don't count. ``update`` stays
    local, while ``compute`` (and ``forward`` with ``dist_sync_on_step``) gathers the states: call it on every rank.

    Args:
        metric: the metric, once it is made. It is changed in place, and moved to the device.
        strategy: the strategy of the run.

    Raises:
        UsageError: it is no metric.

    Example:
        >>> accuracy = synchronise_metric(MulticlassAccuracy(10), strategy)
    """
    # A wrapper, a composition and a collection hold metrics that are updated and synchronised one by one.
    modules: list[Any] = list(metric.modules()) if isinstance(metric, nn.Module) else []
    metrics = [module for module in modules if is_metric(module)]
    if not metrics:
        raise UsageError(
            f"synchronise_metric() takes torchmetrics' metrics, not {type(metric).__name__}. For a mean, use "
            "strategy.meter()."
        )
    strategy.add(_Synchronisation(modules, metrics))
    return metric


class _Synchronisation(Feature):
    """Synchronises metrics. It is added to a run for each call of ``synchronise_metric``, and has no hooks.

    Args:
        modules: the metric, and the modules within it.
        metrics: those among them that have states.
    """

    def __init__(self, modules: list[Any], metrics: list[Any]) -> None:
        self._modules, self._metrics = modules, metrics

    def plug_in(self, sockets: Sockets) -> None:
        """Give the metrics the communicator, and the batch that the script works on."""
        communicator, current_batch = sockets.readers, sockets.batches.current_batch

        def synchronise_states(self: Any, dist_sync_fn: object = None, process_group: object = None) -> None:
            for name, state in _synchronised(self, communicator).items():
                setattr(self, name, state)

        for metric in self._metrics:
            metric.distributed_available_fn = lambda: communicator.world_size > 1
            # In place of torchmetrics' own, which calls a function for one tensor after the other: ranks with lists of
            # different lengths would call it in different numbers.
            metric._sync_dist = MethodType(synchronise_states, metric)
            _leave_stand_ins_out(metric, current_batch)
        for module in self._modules:
            if isinstance(module, nn.ModuleDict) and hasattr(module, "compute_groups"):
                # A MetricCollection, which groups metrics that its first update made equal.
                module.update = _unless_stand_in(module.update, current_batch)  # type: ignore[method-assign]
        self._modules[0].to(communicator.device)


def is_metric(module: Any) -> bool:
    """Return whether a module is a metric of torchmetrics with states of its own."""
    # torchmetrics is not a dependency: metrics are recognised by the attributes that they synchronise through. A
    # composition (metric_a + metric_b) has no states.
    names = ("_sync_dist", "_reductions", "_wrap_update", "distributed_available_fn")
    return all(hasattr(module, name) for name in names) and not hasattr(module, "metric_a")


def _leave_stand_ins_out(metric: Any, current_batch: CurrentBatch) -> None:
    """Replace ``update`` and ``forward``, so that the stand-in of a rank without samples changes no state.

    A ``forward`` still runs for a stand-in, since it may be collective; the states are put back afterwards.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_batch = type(self).forward
        if not current_batch.is_stand_in:
            return of_batch(self, *args, **kwargs)
        inner = [module for module in self.modules() if is_metric(module)]
        saved = copy.deepcopy([(metric.metric_state, metric.update_count) for metric in inner])
        # If only this rank computes, it has nothing else to compute from.
        current_batch.is_stand_in = self.dist_sync_on_step
        try:
            return of_batch(self, *args, **kwargs)
        finally:
            current_batch.is_stand_in = True
            for metric, (states, updates) in zip(inner, saved, strict=True):
                for name, state in states.items():
                    setattr(metric, name, state)
                metric._update_count, metric._computed = updates, None

    def wrap_update(self: Any, update: Callable[..., None]) -> Callable[..., None]:
        return _unless_stand_in(type(self)._wrap_update(self, update), current_batch)

    # Bound methods, and not functions: wrappers copy metrics, and a copy must not update the original.
    metric.forward = MethodType(forward, metric)
    metric._wrap_update = MethodType(wrap_update, metric)  # a copy calls it again
    metric.update = _unless_stand_in(metric.update, current_batch)


def _unless_stand_in(update: Callable[..., None], current_batch: CurrentBatch) -> Callable[..., None]:
    """Return an ``update`` that does nothing for a stand-in."""

    def call(*args: Any, **kwargs: Any) -> None:
        if not current_batch.is_stand_in:
            update(*args, **kwargs)

    return call


def _synchronised(metric: Any, communicator: Communicator) -> dict[str, Any]:
    """Return the states of a metric over all ranks. Collective.

    torchmetrics' own way needs lists of one length on all ranks, rows on each, and, for some, torch.distributed.
    """
    reductions = metric._reductions
    states = {name: getattr(metric, name) for name in reductions}
    for name, state in states.items():
        if isinstance(state, list) and state and getattr(reductions[name], "__name__", "") == "dim_zero_cat":
            states[name] = [reductions[name](state)]  # to send one tensor instead of one for each update
    # A single exchange, as objects: ranks may have lists of different lengths, and tensors of different shapes.
    ranks = communicator.all_gather_object((states, metric.update_count > 0))
    # A rank without samples would count in a mean, and makes NaN of a formula for all ranks, such as a correlation's.
    used = [theirs for theirs, is_used in ranks if is_used] or [theirs for theirs, _ in ranks]
    synchronised: dict[str, Any] = {}
    for name, reduction in reductions.items():
        of_ranks = [theirs[name] for theirs in used]
        if isinstance(states[name], list):
            # One of each rank in turn, which is the order of the dataset.
            turns = zip_longest(*([(item,) for item in items] for items in of_ranks), fillvalue=())
            value: Any = [_moved(item, metric) for turn in turns for entry in turn for item in entry]
        else:
            value = torch.stack([_moved(state, metric) for state in of_ranks])
        # Reductions can't concatenate nothing, if no rank has rows.
        synchronised[name] = value if reduction is None or not len(value) else reduction(value)
    return synchronised


def _moved(item: Any, metric: Any) -> Any:
    # Objects arrive on the CPU, but the rows of this rank are on the metric's device.
    return item.to("cpu" if metric.compute_on_cpu else metric.device) if isinstance(item, Tensor) else item
