"""Gives a run's objects the state of a checkpoint, which rank 0 has opened, or of which each rank reads a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.checkpoint import fit
from unitrain.checkpoint.folder import RUN, Saved
from unitrain.checkpoint.parameter_names import in_order, numbers_before, path_in_order
from unitrain.checkpoint.run_state import RunState
from unitrain.communicator import Communicator
from unitrain.training.streaming import Form, Held, Keys, receive, receive_optimizer, rows_read

_CPU, _META = torch.device("cpu"), torch.device("meta")


def order_by_name(state: RunState, parts: dict[str, Any], opened: Saved | None, places: dict[str, list[Keys]]) -> None:
    """Put the state of each optimizer's parameters in the order that they have now.

    Args:
        state: the run's.
        parts: the outlines of all parts.
        opened: the checkpoint; on rank 0 only.
        places: by part, where tensors are that several ranks have written.
    """
    for name, own in state.names.items():
        names = parts[RUN].get("names", {}).get(name)  # not in a checkpoint of before they were saved
        if own is not None and names is not None and names != own:
            before = numbers_before(name, parts[name]["param_groups"], names, own)
            parts[name] = in_order(parts[name], before)
            if opened is not None:
                opened.parts[name] = in_order(opened.parts[name], before)
            if name in places:
                places[name] = [path_in_order(path, before) for path in places[name]]


def rows_of(communicator: Communicator, state: RunState, name: str, path: Keys, rows: int) -> range:
    """Return which of so many rows of a saved tensor this rank reads.

    Args:
        communicator: the communicator of this process.
        state: the run's.
        name: of the part that the tensor is in.
        path: where in it.
        rows: their number.
    """
    value, target = state.objects[name], None
    if isinstance(value, nn.Module):
        target = state.of(value).get(path[0])
    elif isinstance(value, Optimizer) and path[0] == "state":
        target = [p for group in value.param_groups for p in group["params"]][path[1]]
    return rows_read(communicator, target, rows)


def replaced_options(state: RunState, parts: Mapping[str, Any]) -> list[str]:
    """Return which options of the script's optimizers the outlines of a checkpoint replace, for a message."""
    return [
        option
        for name, optimizer in state.optimizers.items()
        for option in fit.replaced_options(name, optimizer.param_groups, parts[name]["param_groups"])
    ]


def load(
    communicator: Communicator,
    state: RunState,
    parts: Mapping[str, Any],
    opened: Saved | None,
    held: Mapping[str, Held],
    sent: Callable[[], None],
) -> dict[str, Any]:
    """Load the state of all objects, and return that of the run itself. Collective.

    Args:
        communicator: the communicator of this process.
        state: the run's.
        parts: the outlines of all parts.
        opened: the checkpoint; on rank 0 only.
        held: by part, what this rank can read.
        sent: called when memory of what was read may be released.
    """

    def source(name: str) -> Any:
        return opened.parts[name] if opened is not None else None

    objects = state.objects
    # Loaders first: they refuse other data before the model is changed.
    for name in sorted(objects, key=lambda n: (isinstance(objects[n], (nn.Module, Optimizer)), n)):
        value = objects[name]
        if isinstance(value, Optimizer):
            receive_optimizer(communicator, value, parts[name], source(name), sent=sent, held=held.get(name, {}))
            value._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that it never stepped
            continue
        own = state.of(value) if isinstance(value, nn.Module) else None
        found = receive(communicator, parts[name], source(name), own=own, sent=sent, held=held.get(name, {}))
        if isinstance(value, nn.Module):
            state.prepared.unwrap(value).load_state_dict(found)
        elif isinstance(value, dict):
            value.update(found)
        else:
            value.load_state_dict(found)

    def new(path: Keys, form: Form) -> Tensor:
        return form.empty(_META if path[0] == "random" and path[1] != communicator.rank else _CPU)

    run: dict[str, Any] = receive(communicator, parts[RUN], source(RUN), new=new, sent=sent)
    return run
