"""The states that torchmetrics' metrics have accumulated on each rank, saved and divided among the ranks again.

torchmetrics leaves these states out of ``state_dict``, and rank 0's would not be all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from unitrain.checkpoint.sharded.saving import of_rank
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import SentState, needed
from unitrain.errors import CheckpointError
from unitrain.features.torchmetrics.synchronisation import is_metric
from unitrain.training.state_parts import StatePart

# The states of several ranks can be one rank's if torchmetrics' function of this name reduces them over the ranks.
_DIVISIBLE = ("dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat")


class MetricStates(StatePart):
    """The states of the metrics among a checkpoint's modules, and within them, as each rank has accumulated them.

    Args:
        communicator: the communicator of this process.
        modules: the modules by name.
    """

    name = "torchmetrics"

    def __init__(self, communicator: Communicator, modules: Mapping[str, nn.Module]) -> None:
        self._ranks = communicator
        self._modules = modules
        self._loaded: list[str] = []  # names of metrics with states that can be loaded

    @classmethod
    def of(cls, communicator: Communicator, objects: Mapping[str, Any]) -> MetricStates | None:
        """Return the part of a checkpoint of these objects, if modules are among them."""
        modules = {name: value for name, value in objects.items() if isinstance(value, nn.Module)}
        return cls(communicator, modules) if modules else None

    @property
    def _metrics(self) -> dict[str, Any]:
        """The metrics, by name."""
        return {
            f"{name}.{path}" if path else name: metric
            for name, module in self._modules.items()
            for path, metric in _metrics_in(module)
        }

    def collect(self) -> list[dict[str, Any]] | None:
        """Return the states of each rank's metrics. Collective; only rank 0's result can be used."""
        metrics = self._metrics
        if not metrics:
            return None
        states = {
            name: {
                "updates": metric.update_count,
                "states": {state: getattr(metric, state) for state in metric._reductions},
            }
            for name, metric in metrics.items()
        }
        return [of_rank(self._ranks, rank, states) for rank in range(self._ranks.world_size)]

    def check(self, outline: list[Any], *, force: bool) -> None:
        """Raise CheckpointError if the saved metrics are others, or can't be divided among another number of ranks.

        With ``force``, metrics that can't be divided are left out.
        """
        metrics, world_size = self._metrics, self._ranks.world_size
        self._loaded = []
        if not metrics or not outline:
            return
        if set(metrics) != set(outline[0]):
            raise CheckpointError(
                f"the checkpoint has states of the metrics {', '.join(sorted(outline[0])) or 'none'}, but this run has "
                f"{', '.join(sorted(metrics))}: pass the same metrics to strategy.checkpoint. Nothing was loaded."
            )
        self._loaded = list(metrics)
        if len(outline) == world_size:
            return
        used = [name for name in metrics if any(of_rank[name]["updates"] for of_rank in outline)]
        reasons = {name: reason for name in used if (reason := _indivisible(metrics[name]))}
        if reasons and not force:
            name, reason = next(iter(reasons.items()))
            raise CheckpointError(
                f"the metric {name} can't be divided among {world_size} processes instead of {len(outline)}: {reason}. "
                f"Resume with {len(outline)} processes, or with resume(force=True), which resets the metric. Nothing "
                "was loaded."
            )
        self._loaded = [name for name in metrics if name not in reasons]

    def load(self, saved: SentState) -> None:
        """Reset the metrics, and load the saved states, merged if they are of more ranks than there are. Collective."""
        # With fewer ranks than saved the states, each rank takes over several.
        mine = range(self._ranks.rank, len(saved.outline), self._ranks.world_size)
        states = saved.receive(new=needed(lambda path: path[0] in mine))
        for name, metric in self._metrics.items():
            metric.reset()
            theirs = [states[rank][name] for rank in mine if name in self._loaded]
            for state, reduction in metric._reductions.items() if theirs else ():
                values = [_moved(of_rank["states"][state], metric.device) for of_rank in theirs]
                setattr(metric, state, values[0] if len(values) == 1 else _merged(reduction, values))
            metric._update_count = sum(of_rank["updates"] for of_rank in theirs)


def _metrics_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    collection: Any
    for collection in module.modules():
        if isinstance(collection, nn.ModuleDict) and hasattr(collection, "compute_groups"):  # a MetricCollection
            # Some of its metrics share a state, which this brings up to date in all of them.
            collection.items(keep_base=True, copy_state=False)  # type: ignore[call-arg]
    for path, inner in module.named_modules():
        if is_metric(inner):
            yield path, inner


def _indivisible(metric: Any) -> str:
    for state, reduction in metric._reductions.items():
        if reduction is None:
            return f"its state {state} is gathered from the ranks, and not reduced"
        name = getattr(reduction, "__name__", str(reduction))
        if name not in _DIVISIBLE:
            return f"its state {state} is reduced over the ranks by {name.removeprefix('dim_zero_')}"
        if name == "dim_zero_sum" and metric._defaults[state].any():
            return f"its state {state} is a sum that does not begin with 0 on each rank"
    return ""


def _moved(value: Any, device: torch.device) -> Any:
    return [tensor.to(device) for tensor in value] if isinstance(value, list) else value.to(device)


def _merged(reduction: Any, values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [tensor for value in values for tensor in value]
    return reduction(torch.stack(values) if reduction.__name__ != "dim_zero_cat" else values)
