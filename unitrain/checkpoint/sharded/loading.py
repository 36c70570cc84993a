"""Gives a run's objects the state of a checkpoint, which rank 0 has opened, or of which each rank reads its part."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.checkpoint import fit
from unitrain.checkpoint.names import GROUPS, STATE, in_order, keys_of, numbers_before
from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.sharded.dcp import Region, copy_overlap
from unitrain.checkpoint.sharded.opening import CheckpointView
from unitrain.checkpoint.sharded.saving import owners
from unitrain.checkpoint.store.manifest import RUN, DamagedError
from unitrain.communication.communicator import Communicator
from unitrain.communication.streaming import (
    Form,
    Keys,
    broadcast_tensors,
    own_rows,
    receive,
    receive_optimizer,
)
from unitrain.errors import CheckpointError

_CPU, _META = torch.device("cpu"), torch.device("meta")


def order_by_name(state: RunState, opened: CheckpointView) -> None:
    """Put the saved state of each optimizer's parameters in the order that they have now."""
    outlines = opened.outlines
    for name, own in state.names.items():
        saved = outlines[RUN].get("names", {}).get(name)  # not in a checkpoint of before they were saved
        if saved is None or own is None or saved == keys_of(None, len(saved)):
            continue
        now = keys_of(own, len(own)) if isinstance(saved[0], str) else own
        if saved != now:
            before = numbers_before(name, outlines[name][GROUPS], saved, now)
            outlines[name] = in_order(outlines[name], before)
            if opened.saved is not None:
                opened.saved.parts[name] = in_order(opened.saved.parts[name], before)


def replaced_options(state: RunState, outlines: Mapping[str, Any]) -> list[str]:
    """Return which options of the script's optimizers the outlines of a checkpoint replace, for a message."""
    return [
        option
        for name, optimizer in state.optimizers.items()
        for option in fit.replaced_options(name, optimizer.param_groups, outlines[name][GROUPS])
    ]


# ------------------------------------------------------------------------------------ what several ranks have written


class Parts:
    """Reads what several ranks have written of a checkpoint that fits the state of the run."""

    def __init__(self, communicator: Communicator, state: RunState, opened: CheckpointView) -> None:
        self._communicator = communicator
        self._state = state
        self._opened = opened
        self._owners: dict[str, list[int | None]] = {}
        if opened.by_several:
            for name, optimizer in state.optimizers.items():
                count = sum(len(group["params"]) for group in optimizer.param_groups)
                self._owners[name] = owners(communicator, optimizer.state_dict()[STATE], count)

    def verify(self) -> str | None:
        """Have each rank verify some of the files, and return what is damaged, if anything is. Collective.

        If there are as many ranks as when the files were written, they are those that the rank reads. It verifies
        others that it reads when it opens them.

        Raises:
            CheckpointError: a rank can't read a file; on every rank.
        """
        ranks, damage, why = self._communicator, "", ""
        names = [name for name in self._opened.manifest.files if name.endswith(".distcp")]  # in the order of ranks
        # As many, one after the other: what a rank needs of tensors that are divided anew is mostly in these.
        mine = [name for n, name in enumerate(names) if n * ranks.world_size // len(names) == ranks.rank]
        if self._opened.stored is not None and self._opened.stored.files is not None:
            try:
                self._opened.stored.files.fetch(mine if self._opened.each else names)
            except DamagedError as error:
                damage = str(error)
            except CheckpointError as error:
                why = str(error)
        answers = ranks.all_gather_data([damage, why]) if self._opened.by_several else []
        failures = [why for _, why in answers if why]
        if failures:
            raise CheckpointError(f"{failures[0]}. Nothing was loaded.")
        return next((damage for damage, _ in answers if damage), None)

    def fill(self, name: str, triples: Sequence[tuple[Keys, Form, Tensor]]) -> None:
        """Overwrite tensors of an object, given their paths and forms. Collective. Raises CheckpointError."""
        ranks, each = self._communicator, self._opened.each
        whole, divided, reads = [], [], {}
        for path, form, found in triples:
            key, owner = (
                str(form.key),
                self._owners[name][path[1]] if path[0] == STATE and name in self._owners else None,
            )
            sharded = ranks.is_sharded(found)
            if not sharded and owner is None:
                whole.append(found)
                if ranks.is_main:
                    reads[key] = found, Region.rows(0, found)
            elif not each:
                divided.append((key, found))
            elif sharded:
                local, first = own_rows(ranks, found)
                reads[key] = local, Region.rows(first, local)
            elif owner == ranks.rank:
                reads[key] = found, Region.rows(0, found)
        self._read(reads)
        if ranks.world_size > 1:
            broadcast_tensors(ranks, whole, whole)
        if divided:
            self._send(dict(divided))

    def _read(self, reads: Mapping[str, tuple[Tensor, Region]]) -> None:
        why = ""
        try:
            if self._opened.stored is not None:
                self._opened.stored.read(reads)
        except (DamagedError, CheckpointError) as error:
            why = str(error)
        failures = list(filter(None, self._communicator.all_gather_data(why)))
        if failures:
            raise CheckpointError(failures[0])
        self._opened.release()

    @torch.no_grad()
    def _send(self, targets: Mapping[str, Tensor]) -> None:
        """Have rank 0 read tensors, a piece at a time, and every rank copy its parts of them."""
        ranks, stored = self._communicator, self._opened.stored

        def regions() -> list[tuple[str, torch.dtype, tuple[Any, ...]]]:
            assert stored is not None
            entries = ((key, stored.layout[key]) for key in targets)
            return [(key, entry.new("meta").dtype, tuple(one.region)) for key, entry in entries for one in entry.pieces]

        for key, dtype, plain in ranks.on_main(regions):
            region, target = Region(*plain), targets[key]
            piece = torch.empty(region.sizes, dtype=dtype)
            self._read({key: (piece, region)} if ranks.is_main else {})
            piece = ranks.broadcast(piece)
            local, first = own_rows(ranks, target) if ranks.is_sharded(target) else (target, 0)
            copy_overlap(local, Region.rows(first, local), piece, region)


def load(communicator: Communicator, state: RunState, opened: CheckpointView, parts: Parts) -> dict[str, Any]:
    """Load the state of all objects, and return that of the run itself. Collective."""
    outlines, source, sent = opened.outlines, opened.source, opened.release
    objects = {name: value for name, value in state.objects.items() if name in outlines}  # another tool has no loaders
    # Loaders first: they refuse other data before the model is changed.
    for name in sorted(objects, key=lambda n: (isinstance(objects[n], (nn.Module, Optimizer)), n)):
        value, fill = objects[name], partial(parts.fill, name)
        if isinstance(value, Optimizer):
            receive_optimizer(communicator, value, outlines[name], source(name), sent=sent, fill=fill)
            value._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that it never stepped
            continue
        own = state.of(value) if isinstance(value, nn.Module) else None
        found = receive(communicator, outlines[name], source(name), own=own, sent=sent, fill=fill)
        if isinstance(value, nn.Module):
            # Several ranks have not saved the versions of its layers.
            complete = found if hasattr(found, "_metadata") else _filled(own, found)
            state.prepared.unwrap(value).load_state_dict(complete)
        elif isinstance(value, dict):
            value.update(found)
        else:
            value.load_state_dict(found)

    def new(path: Keys, form: Form) -> Tensor:
        return form.empty(_META if path[0] == "random" and path[1] != communicator.rank else _CPU)

    run: dict[str, Any] = receive(communicator, outlines[RUN], source(RUN), new=new, sent=sent)
    return run


def _filled(like: Any, values: Mapping[str, Any]) -> Any:
    """Return a dict of values with the attributes of another, which a module's state has."""
    made = copy.copy(like)
    made.update(values)
    return made
