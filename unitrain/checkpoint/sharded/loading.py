"""Gives a run's objects the state of a checkpoint, which rank 0 has opened, or of which each rank reads its part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.checkpoint.names import GROUPS, PARAMS, STATE, in_order, keys_of, numbers_before
from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.sharded.dcp import METADATA, Region, Stored
from unitrain.checkpoint.sharded.opening import OpenCheckpoint
from unitrain.checkpoint.sharded.saving import owners
from unitrain.checkpoint.store.located import RUN, DamagedError, Located, Manifest, store_at
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import (
    Form,
    Keys,
    broadcast_tensors,
    needed,
    outline,
    own_rows,
    receive,
    receive_optimizer,
)
from unitrain.errors import CheckpointError


class CheckpointView(NamedTuple):
    """An open checkpoint, as a rank sees it."""

    communicator: Communicator
    state: RunState
    manifest: Manifest
    outlines: dict[str, Any]  # the states by name, with the forms of the tensors in their places
    saved: OpenCheckpoint | None  # the checkpoint itself; on rank 0 only
    by_several: bool  # whether several ranks have written tensors
    stored: Stored | None  # those tensors, if this rank sees them
    each: bool  # whether each rank reads its own parts of them; else rank 0 reads all, and sends the parts

    def source(self, name: str) -> Any:
        """Return a state with its tensors on rank 0, and None on the others."""
        return None if self.saved is None else self.saved.parts[name]

    def release(self) -> None:
        """Release the memory of what has been read."""
        if self.saved is not None:
            self.saved.files.release()

    def close(self) -> None:
        """Remove what was downloaded."""
        if self.stored is not None:
            self.stored.close()

    def verify(self) -> str | None:
        """Have each rank verify some of the files, and return what is damaged, if anything is. Collective.

        If there are as many ranks as when the files were written, they are those that the rank reads. It verifies
        others that it reads when it opens them.
        """
        if not self.by_several:
            return None
        ranks, damage, why = self.communicator, "", ""
        names = [name for name in self.manifest.files if name.endswith(".distcp")]  # in the order of ranks
        # As many, one after the other: what a rank needs of tensors that are divided anew is mostly in these.
        mine = [name for n, name in enumerate(names) if n * ranks.world_size // len(names) == ranks.rank]
        try:
            if self.stored is not None:
                self.stored.check(mine if self.each else names)
        except DamagedError as error:
            damage = str(error)
        except CheckpointError as error:
            why = str(error)
        answers = ranks.all_gather_data([damage, why])
        failures = [why for _, why in answers if why]
        if failures:
            raise CheckpointError(f"{failures[0]}. Nothing was loaded.")
        return next((damage for damage, _ in answers if damage), None)

    def fill(self, name: str, triples: Sequence[tuple[Keys, Form, Tensor]]) -> None:
        """Overwrite tensors of an object, given their paths and forms. Collective. Raises CheckpointError."""
        if not self.by_several:
            return
        ranks, reads, sent = self.communicator, {}, {}
        owned: list[int | None] = []
        if name in self.state.optimizers:
            optimizer = self.state.optimizers[name]
            count = sum(len(group[PARAMS]) for group in optimizer.param_groups)
            owned = owners(ranks, optimizer.state_dict()[STATE], count)
        for path, form, found in triples:
            key, sharded = str(form.key), ranks.sharding.is_sharded(found)
            owner = owned[path[1]] if owned and path[0] == STATE else None
            if not self.each or (owner is None and not sharded):
                sent[key] = found
                if ranks.is_main and not sharded and not found.is_meta:
                    reads[key] = found, Region.rows(0, found)
            elif sharded:
                local, first = own_rows(ranks, found)
                reads[key] = local, Region.rows(first, local)
            elif owner == ranks.rank:
                reads[key] = found, Region.rows(0, found)
        self._read(reads)
        if ranks.world_size > 1:
            # What rank 0 has only a part of, it reads when it is sent.
            stored = self.stored
            sources = (found if key in reads or stored is None else stored.whole(key) for key, found in sent.items())
            broadcast_tensors(ranks, list(sent.values()), sources)

    def _read(self, reads: Mapping[str, tuple[Tensor, Region]]) -> None:
        why = ""
        try:
            if self.stored is not None:
                self.stored.read(reads)
        except (DamagedError, CheckpointError) as error:
            why = str(error)
        failures = list(filter(None, self.communicator.all_gather_data(why)))
        if failures:
            raise CheckpointError(failures[0])
        self.release()


def open_on_all(
    communicator: Communicator, state: RunState, opened: Callable[[], OpenCheckpoint | None]
) -> CheckpointView | None:
    """Return the checkpoint that ``opened`` returns on rank 0, as this rank sees it. Collective.

    Errors of ``opened`` are raised on every rank.
    """
    saved: OpenCheckpoint | None = None

    def described() -> tuple[dict[str, Any], dict[str, Any], str | None, str] | None:
        nonlocal saved
        saved = opened()
        if saved is None:
            return None
        if not saved.found.manifest.files:  # another tool has written it
            saved = _fitted(saved, state)
        digest = None if saved.stored is None else saved.stored.digest
        return saved.found.manifest.model_dump(), outline(saved.parts), digest, saved.found.place

    description = communicator.on_main(described)
    if description is None:
        return None
    dumped, outlines, digest, place = description
    manifest = Manifest.model_validate(dumped)
    stored = None if saved is None else saved.stored
    if digest is not None and communicator.sharding.any and not communicator.is_main:
        stored = _seen(place, manifest, digest)
    each = digest is not None and communicator.sharding.any and all(communicator.all_gather_data(stored is not None))
    return CheckpointView(communicator, state, manifest, outlines, saved, digest is not None, stored, each)


def _seen(place: str, manifest: Manifest, digest: str) -> Stored | None:
    """Return what rank 0 has found, on another rank; None if this rank does not see the same."""
    store = store_at(place)
    try:
        stored = Stored(Located(store, "", manifest), store.get(METADATA))
    except (OSError, CheckpointError):
        return None
    return stored if stored.digest == digest else None


def _fitted(saved: OpenCheckpoint, state: RunState) -> OpenCheckpoint:
    """Return what another tool has written with the objects of this run. A model may have been saved without name."""
    parts, used = dict(saved.parts), (RUN, *state.modules, *state.optimizers)
    missing = [name for name in (*state.modules, *state.optimizers) if name not in parts]
    if "" in parts and len(missing) == 1 and missing[0] in state.modules:
        parts[missing.pop()] = parts[""]
    if missing:
        raise CheckpointError(
            f"{saved.found} has {', '.join(sorted(filter(None, saved.parts.keys() - {RUN})))}, but no {missing[0]}: "
            "name modules and optimizers in strategy.checkpoint as their keys begin there. Nothing was loaded."
        )
    return saved._replace(parts={name: its for name, its in parts.items() if name in used})


def order_by_name(state: RunState, opened: CheckpointView) -> None:
    """Put the saved state of each optimizer's parameters in the order that they have now."""
    outlines = opened.outlines
    for name, own in state.names.items():
        saved = outlines[RUN]["names"].get(name)
        if saved is None or own is None or saved == keys_of(None, len(saved)):
            continue
        now = keys_of(own, len(own)) if isinstance(saved[0], str) else own
        if saved != now:
            before = numbers_before(name, outlines[name][GROUPS], saved, now)
            for parts in (outlines,) if opened.saved is None else (outlines, opened.saved.parts):
                parts[name] = in_order(parts[name], before)
                for extra in state.extra:
                    if extra.name in parts:
                        parts[extra.name] = extra.in_order(parts[extra.name], before)


def load(communicator: Communicator, state: RunState, opened: CheckpointView) -> dict[str, Any]:
    """Load the state of all objects, and return that of the run itself. Collective."""
    outlines, source, sent = opened.outlines, opened.source, opened.release
    objects = {name: value for name, value in state.objects.items() if name in outlines}  # another tool has no loaders
    # Loaders first: they refuse other data before the model is changed.
    for name in sorted(objects, key=lambda n: (isinstance(objects[n], (nn.Module, Optimizer)), n)):
        value, fill = objects[name], partial(opened.fill, name)
        if isinstance(value, Optimizer):
            receive_optimizer(communicator, value, outlines[name], source(name), sent=sent, fill=fill)
            value._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that it never stepped
            continue
        own = state.of(value) if isinstance(value, nn.Module) else None
        found = receive(communicator, outlines[name], source(name), into=own, sent=sent, fill=fill)
        if isinstance(value, nn.Module):
            # Several ranks have not saved the versions of its layers.
            complete = found if hasattr(found, "_metadata") else _filled(own, found)
            state.prepared.unwrap(value).load_state_dict(complete)
        elif isinstance(value, dict):
            value.update(found)
        else:
            value.load_state_dict(found)
    here = needed(lambda path: path[0] != "random" or path[1] == communicator.rank)
    run: dict[str, Any] = receive(communicator, outlines[RUN], source(RUN), new=here, sent=sent)
    return run


def _filled(like: Any, values: Mapping[str, Any]) -> Any:
    """Return a dict of values with the attributes of another, which a module's state has."""
    made = copy.copy(like)
    made.update(values)
    return made
