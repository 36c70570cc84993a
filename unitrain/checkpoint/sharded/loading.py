"""Gives a run's objects the state of a checkpoint, which rank 0 has opened, or of which each rank reads a part."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.checkpoint import fit
from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.sharded.opening import Opened
from unitrain.checkpoint.sharded.parameter_names import in_order, numbers_before, path_in_order
from unitrain.checkpoint.sharded.shards import put_blocks
from unitrain.checkpoint.store.manifest import RUN
from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import Form, Held, Keys, RowBlocks, receive, receive_optimizer, rows_read

_CPU, _META = torch.device("cpu"), torch.device("meta")


def order_by_name(state: RunState, opened: Opened) -> None:
    """Put the saved state of each optimizer's parameters in the order that they have now."""
    outlines, places = opened.outlines, opened.paths
    for name, own in state.names.items():
        names = outlines[RUN].get("names", {}).get(name)  # not in a checkpoint of before they were saved
        if own is not None and names is not None and names != own:
            before = numbers_before(name, outlines[name]["param_groups"], names, own)
            outlines[name] = in_order(outlines[name], before)
            if opened.saved is not None:
                opened.saved.parts[name] = in_order(opened.saved.parts[name], before)
            if name in places:
                places[name] = [path_in_order(path, before) for path in places[name]]


def read_own(communicator: Communicator, state: RunState, opened: Opened) -> dict[str, dict[Keys, RowBlocks]]:
    """Return, by part, the blocks that this rank reads itself; others it is sent by rank 0. Collective.

    Raises:
        CheckpointError: a file can't be read; on every rank.
    """
    if opened.joint is None:
        return {}
    held = opened.joint.blocks(opened.paths, opened.outlines, partial(_rows_of, communicator, state))
    if opened.saved is not None:
        put_blocks(opened.saved.parts, held)
    return held


def _rows_of(communicator: Communicator, state: RunState, name: str, path: Keys, rows: int) -> range:
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


def replaced_options(state: RunState, outlines: Mapping[str, Any]) -> list[str]:
    """Return which options of the script's optimizers the outlines of a checkpoint replace, for a message."""
    return [
        option
        for name, optimizer in state.optimizers.items()
        for option in fit.replaced_options(name, optimizer.param_groups, outlines[name]["param_groups"])
    ]


def load(communicator: Communicator, state: RunState, opened: Opened, held: Mapping[str, Held]) -> dict[str, Any]:
    """Load the state of all objects, and return that of the run itself. Collective.

    Args:
        communicator: the communicator of this process.
        state: the run's.
        opened: the checkpoint.
        held: what this rank has read itself.
    """
    objects, outlines, source, sent = state.objects, opened.outlines, opened.source, opened.release
    # Loaders first: they refuse other data before the model is changed.
    for name in sorted(objects, key=lambda n: (isinstance(objects[n], (nn.Module, Optimizer)), n)):
        value = objects[name]
        if isinstance(value, Optimizer):
            receive_optimizer(communicator, value, outlines[name], source(name), sent=sent, held=held.get(name, {}))
            value._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that it never stepped
            continue
        own = state.of(value) if isinstance(value, nn.Module) else None
        found = receive(communicator, outlines[name], source(name), own=own, sent=sent, held=held.get(name, {}))
        if isinstance(value, nn.Module):
            state.prepared.unwrap(value).load_state_dict(found)
        elif isinstance(value, dict):
            value.update(found)
        else:
            value.load_state_dict(found)

    def new(path: Keys, form: Form) -> Tensor:
        return form.empty(_META if path[0] == "random" and path[1] != communicator.rank else _CPU)

    run: dict[str, Any] = receive(communicator, outlines[RUN], source(RUN), new=new, sent=sent)
    return run
