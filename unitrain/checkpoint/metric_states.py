"""The states that torchmetrics' metrics have accumulated on each rank, saved and divided among the ranks again.

torchmetrics leaves these states out of ``state_dict``, and rank 0's would not be all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.checkpoint.sharded.saving import of_rank
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import needed, receive
from unitrain.errors import CheckpointError

# The states of two ranks as one state, by the names of torchmetrics' functions that reduce them over the ranks.
_MERGED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": lambda one, other: torch.cat([one, other]),
}


def metrics_in(objects: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the metrics among modules and within them, by name."""
    return {
        f"{name}.{path}" if path else name: metric
        for name, module in objects.items()
        for path, metric in _metrics(module)
    }


def _metrics(module: nn.Module) -> Iterator[tuple[str, Any]]:
    collection: Any
    for collection in module.modules():
        if isinstance(collection, nn.ModuleDict) and hasattr(collection, "compute_groups"):  # a MetricCollection
            # Some of its metrics share a state, which this brings up to date in all of them.
            collection.items(keep_base=True, copy_state=False)  # type: ignore[call-arg]
    for path, inner in module.named_modules():
        # torchmetrics is not a dependency: metrics are recognised by their attributes.
        if all(hasattr(inner, name) for name in ("_reductions", "_defaults", "update_count")):
            yield path, inner


def gather(communicator: Communicator, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the states of each rank's metrics; only rank 0's result can be used. Collective."""
    own = {
        name: {
            "updates": metric.update_count,
            "states": {state: getattr(metric, state) for state in metric._reductions},
        }
        for name, metric in metrics.items()
    }
    return [of_rank(communicator, rank, own) for rank in range(communicator.world_size)]


def check(metrics: Mapping[str, Any], saved: list[Any] | None, world_size: int, *, force: bool) -> list[str]:
    """Return the names of the metrics whose saved states, given the outlines of each rank's, can be loaded.

    With ``force``, metrics that can't be divided among another number of ranks are left out. Raises CheckpointError if
    the saved metrics are others, or can't be divided.
    """
    if not metrics or not saved:
        return []
    if set(metrics) != set(saved[0]):
        raise CheckpointError(
            f"the checkpoint has states of the metrics {', '.join(sorted(saved[0])) or 'none'}, but this run has "
            f"{', '.join(sorted(metrics))}: pass the same metrics to strategy.checkpoint. Nothing was loaded."
        )
    if len(saved) == world_size:
        return list(metrics)
    used = [name for name in metrics if any(one[name]["updates"] for one in saved)]
    reasons = {name: reason for name in used if (reason := _indivisible(metrics[name]))}
    if reasons and not force:
        name, reason = next(iter(reasons.items()))
        raise CheckpointError(
            f"the metric {name} can't be divided among {world_size} processes instead of {len(saved)}: {reason}. "
            f"Resume with {len(saved)} processes, or with resume(force=True), which resets the metric. Nothing was "
            "loaded."
        )
    return [name for name in metrics if name not in reasons]


def _indivisible(metric: Any) -> str:
    for state, reduction in metric._reductions.items():
        if reduction is None:
            return f"its state {state} is gathered from the ranks, and not reduced"
        name = getattr(reduction, "__name__", str(reduction))
        if name not in _MERGED:
            return f"its state {state} is reduced over the ranks by {name.removeprefix('dim_zero_')}"
        if name == "dim_zero_sum" and metric._defaults[state].any():
            return f"its state {state} is a sum that does not begin with 0 on each rank"
    return ""


def load(
    communicator: Communicator,
    metrics: Mapping[str, Any],
    names: Sequence[str],
    expected: list[Any],
    source: Any,
) -> None:
    """Reset metrics, and load what the ranks had saved. With another number of ranks, states are merged. Collective.

    States are loaded of the metrics with these ``names``. ``expected`` are the outlines of each rank's states, and
    ``source`` the states, on rank 0.
    """
    mine = range(communicator.rank, len(expected), communicator.world_size)
    saved = receive(communicator, expected, source, new=needed(lambda path: path[0] in mine))
    for name, metric in metrics.items():
        metric.reset()
        for number, rank in enumerate(mine if name in names else ()):
            theirs = saved[rank][name]
            for state, value in theirs["states"].items():
                value = _moved(value, metric.device)
                before = getattr(metric, state)
                setattr(metric, state, value if number == 0 else _merged(metric._reductions[state], before, value))
            metric._update_count += theirs["updates"]


def _moved(value: Any, device: torch.device) -> Any:
    return [one.to(device) for one in value] if isinstance(value, list) else value.to(device)


def _merged(reduction: Any, one: Any, other: Any) -> Any:
    return one + other if isinstance(one, list) else _MERGED[reduction.__name__](one, other)
