"""Copies of a run's state in the memory of its hosts, every few steps: they outlive the processes.

``resume`` finds the newest complete one if it is newer than the folder's newest checkpoint. So a crash costs at most
the steps since the last copy.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any
from uuid import uuid4

from pydantic import BaseModel, Field

from unitrain.checkpoint.checkpoint import Checkpoint
from unitrain.checkpoint.hooks import Candidate, CheckpointHook
from unitrain.checkpoint.sharded.saving import NOTE, Portion, awaited_note, write_shards
from unitrain.checkpoint.store.folder import Draft, Folder
from unitrain.checkpoint.store.located import DamagedError
from unitrain.checkpoint.store.store import Store, folder_name
from unitrain.checkpoint.writer import Background
from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import first_reason
from unitrain.communication.structure import tensors
from unitrain.errors import CheckpointError, ConfigError
from unitrain.features.memory_copies import Settings
from unitrain.process import print_stderr
from unitrain.training.hooks import StepHook
from unitrain.training.loop.sockets import Sockets
from unitrain.training.state_parts import FEATURE

from .memory_store import MemoryStore, folder_of
from .neighbour import Neighbour

_ID = "run.json"


class _Identity(BaseModel):
    """Which run a folder has: the content of a file beside its checkpoints."""

    run: str
    life: Annotated[int, Field(ge=0)]  # the number of the last start
    location: str  # of the folder in that start
    memory: str | None  # the setting ``memory_copies.folder`` in that start


_SHARE = 0.01  # of the time, which copies may take
_AT_FIRST = 10  # steps between copies while the cost of one is not known
_PART_OF_ROOM = 4
_MARKS = 2  # copies that are kept to go back to


class MemoryCopies(StepHook, CheckpointHook):
    """Copies the state at boundaries, and finds the copies of an earlier start of the run. Collective.

    Args:
        checkpoint: has the states to copy.
        sockets: of the run.
        key: the job's, with which hosts prove to each other that they belong to it; None in a world of one.

    Attributes:
        active: whether copies are made.
    """

    name = "memory_copies"
    place = 90
    of_checkpoint = True

    def __init__(self, checkpoint: Checkpoint, sockets: Sockets, key: bytes | None) -> None:
        self._checkpoint = checkpoint
        self._folder: Folder = checkpoint.folder
        self._key = key
        self._sockets = sockets
        self._ranks: Communicator = sockets.communicator
        self._pulse = self._ranks.collectives.pulse
        self._every = Settings.of(sockets.config).memory_copies.every
        # While ranks train apart, none has the weights of all.
        self.active: bool = not sockets.replicas.differ if self._every == "auto" else self._every > 0
        if self._every == 0 and self._ranks.is_main:
            with suppress(OSError, CheckpointError):
                self._folder.store.remove(_ID)  # what is in memory is not to come back later
        self._store: MemoryStore | None = None
        self._background: Background | None = None
        self._neighbour: Neighbour | None = None
        self._settings = sockets.config.model_dump(mode="json")
        self._run = ""
        self._life = 0  # which start of the run this is
        self._left: tuple[str, str | None] | None = None  # location and setting of the last start, if they have changed
        self._next = self._steps = 1 if self._every == "auto" else int(self._every)
        self._last: tuple[int, float] | None = None  # the step of the last copy, and when it was made
        self._cost_s = 0.0  # what that took; 0 for the first, which also sets up what the others use
        self._newest = self._kept = ""  # the last copy, and the last that is known to be complete
        self._marks: list[tuple[int, str]] = []  # complete copies to go back to, with their steps
        self._why = ""  # the last one failed on this rank
        if self._every != "auto" and self._every > 2 * sockets.goes_back > 0:
            raise ConfigError(
                f"memory_copies.every is {self._every}, but this run goes back {sockets.goes_back} steps or more at a "
                f"spike, to a copy in memory: set it to auto, or to {2 * sockets.goes_back} at most."
            )
        self._begin()

    def label(self) -> dict[str, Any]:
        """Return which start of the run has written a checkpoint."""
        return {"life": self._life}

    def _begin(self) -> None:
        """Record in the run's folder that this start of the run writes from now on. Collective."""
        if self._every != 0:
            self._run, self._life, self._left = self._ranks.on_main(self._draw)

    def _draw(self) -> tuple[str, int, tuple[str, str | None] | None]:
        last = _identity(self._folder.store)
        run, life = (last.run, last.life + 1) if last else (uuid4().hex, 1) if self.active else ("", 0)
        now = self._folder.store.location, Settings.of(self._sockets.config).memory_copies.folder
        if run:
            identity = _Identity(run=run, life=life, location=now[0], memory=now[1])
            self._folder.put(_ID, identity.model_dump_json().encode())
        left = (last.location, last.memory) if last else now
        return run, life, None if left == now else left

    def discarded(self) -> None:
        """Let nothing that is in memory come back: a new run begins. Collective."""
        self._kept = ""
        self._ranks.on_main(lambda: self._folder.store.remove(_ID))
        self._begin()

    def resumed(self, step: int, folder: str) -> None:
        """Continue after the step of a copy, or of a checkpoint. Collective."""
        self._kept, self._newest, self._last = folder, "", None
        self._marks = []
        if self._background is not None:  # its copies of later steps are another branch's
            self._begin()
        self._put_off(step)

    def _put_off(self, step: int) -> None:
        """Record that a step needs no copy."""
        if self.active:
            self._next = step + self._steps - (0 if self._every == "auto" else step % self._steps)

    def candidates(self) -> list[Candidate]:
        """Return copies newer than the folder's newest checkpoint on rank 0, the newest first. Collective."""
        if self._every == 0 or self._background is not None:
            return []  # a script that goes back goes to what it has saved

        def look() -> tuple[int, int]:
            newest, life = next(iter(self._folder.steps()), None), 0
            if newest is None:
                return 0, -1
            with suppress(DamagedError):
                life = int(self._folder.find(newest).manifest.features.get(self.name, {}).get("life", 0))
            return life, newest

        after = self._ranks.on_main(look)
        store = self._meet()
        if not self._run or store.why:
            return []
        if self._left is not None and store.leads and (folder := folder_of(*self._left)).is_dir():
            print_stderr(
                f"unitrain: the copies in memory in {folder} are not used: memory_copies.folder, or the place of the "
                "run's folder, was another one. To use them, start the run with what it was."
            )
        return store.recall(self._run, after, self._settings)

    def _meet(self) -> MemoryStore:
        if self._store is None:
            location = self._ranks.on_main(lambda: self._folder.store.location)
            self._store = MemoryStore(self._ranks, location, Settings.of(self._sockets.config).memory_copies.folder)
        return self._store

    def at_boundary(self) -> None:
        """Copy the state if it is time to, and not within a round."""
        if self.active and self._pulse.step >= self._next and self._sockets.stopping.round_began is None:
            with self._pulse.within("a copy in memory"), self._sockets.prepared.training_weights():
                self._copy()
                if self._every == 1 and self._background is not None:
                    self._background.wait()
                    self._ranks.barrier()  # no rank begins a step that would be lost in addition

    def _copy(self) -> None:
        ranks, step, began = self._ranks, self._pulse.step, time.perf_counter()
        busy = self._background is not None and self._background.busy
        step_s = (began - self._last[1]) / (step - self._last[0]) if self._last else 0.0
        ratio = self._cost_s / step_s if step_s else 0.0
        # One collective for all that the ranks have to agree on.
        answers = ranks.all_gather_data((busy, self._why, ratio, self._checkpoint.newest))
        if self._off(next((why for _, why, *_ in answers if why), "")):
            return
        if self._every == "auto":
            self._steps = steps_between(max(ratio for _, _, ratio, *_ in answers))
            if self._sockets.goes_back:
                self._steps = min(self._steps, self._sockets.goes_back)
        self._put_off(step)
        if any(answer[0] for answer in answers):
            return  # the last copy is not written yet, from memory that the next one needs
        self._keep_newest()
        store = self._meet()
        portion = self._checkpoint.divided(self._checkpoint.contents.collect())
        if ranks.sharding.any:
            writers = ranks.world_size // ranks.sharding.replicas
            number = ranks.rank if ranks.rank < writers else None
        else:  # one rank of each host writes all. Of features' parts, rank 0 alone has the whole
            is_whole = ranks.is_main or not any(key.startswith(FEATURE) for key in portion.parts)
            writers, number = 1, 0 if store.leads and is_whole else None
        if number != 0:
            portion = Portion({}, portion.shards) if number else Portion({})
        if self._background is None and self._off(self._refusal(portion)):
            return
        self._background = self._background or Background("copy in memory")
        self._newest = f"{folder_name(step)}.{self._life}"
        note = {"run": self._run, "step": step, "saved": answers[0][3], "writers": writers}
        note["about"] = {**self._checkpoint.about(), "best": None}
        name, kept = self._newest, [self._kept, *(marked for _, marked in self._marks)]
        try:
            self._background.run(portion, lambda copied: self._write(name, kept, number, copied, note))
        except Exception as error:  # a state may have anything in it
            self._why = f"rank {ranks.rank} on {store.host[ranks.rank]} can't copy its state: {error}"
        self._cost_s = time.perf_counter() - began if self._last else 0.0
        self._last = (step, time.perf_counter())

    def _keep_newest(self) -> None:
        """Keep the last copy, which is complete on all ranks; to go back to, too, if the one before is old enough."""
        if not self._newest or self._last is None:
            return
        self._kept, step, distance = self._newest, self._last[0], self._sockets.goes_back
        if distance and (not self._marks or step >= self._marks[-1][0] + distance):
            self._marks = [*self._marks, (step, self._kept)][-_MARKS:]

    def go_back(self, newest: int) -> int | None:
        """See ``WayBack.go_back``."""
        with self._pulse.within("going back to a copy in memory"):
            if self._background is not None:
                self._background.wait()
            if not any(self._ranks.all_gather_data(self._why)):
                self._keep_newest()
            old = [mark for mark in self._marks if mark[0] <= newest]
            if not old:
                return None
            step, name = old[-1]
            if not self._checkpoint.go_back(self._meet().recalled(name, self._run, self._settings)):
                return None
        self._marks = old  # later ones are of the state that was left
        return step

    def _off(self, why: str) -> bool:
        """Make no more copies if there is a reason."""
        if why:
            self.active = False
            if self._ranks.is_main:
                print_stderr(
                    f"unitrain: no more copies of the state in memory: {why.removesuffix('.')}. A failure costs what "
                    "was trained since the last checkpoint."
                )
        return bool(why)

    def _refusal(self, portion: Portion) -> str:
        """Return why there can be no copies. Collective; before the first."""
        ranks, store = self._ranks, self._meet()
        if store.why:
            return store.why
        sizes = ranks.all_gather_data(sum(tensor.nbytes for tensor in tensors(portion)))
        leaders = sorted(set(store.leader))
        pairs = list(zip(sizes, store.leader, strict=True))
        totals = [sum(size for size, leader in pairs if leader == host) for host in leaders]
        at, why = leaders.index(store.leader[ranks.rank]), ""
        several = ranks.sharding.any and len(leaders) > 1
        needed, room = totals[at] + (totals[at - 1] if several else 0), store.room()
        if needed > room / (_PART_OF_ROOM + (_MARKS if self._sockets.goes_back else 0)):
            why = (
                f"{store.host[ranks.rank]} would keep {needed} bytes, and several copies, where {room} are free "
                f"({store.disk}; memory_copies.folder may name another folder)"
            )
        why = first_reason(ranks, why)
        if not why and several and self._key is not None:
            self._neighbour = Neighbour(ranks, store, self._key, self._sockets.config.timeout_s)
        return why

    def _write(self, name: str, kept: Sequence[str], number: int | None, copied: Portion, note: dict[str, Any]) -> None:
        """Write this rank's part of a copy, in the background. Remove others than this one and those ``kept``.

        Args:
            name: the name of the copy.
            kept: the names of copies that stay.
            number: the rank that the part is of; None if this rank has none.
            copied: the part, in host memory.
            note: what the note of the part says beside its files.
        """
        store, rank = self._meet(), self._ranks.rank
        draft = Draft(store.disk, name)
        try:
            store.make()  # once more: a cleaner of temporary files may have removed it
            if store.leads:
                store.keep_only(name, *kept)
            store.disk.make(name)
            if number is not None:
                files = draft.write(copied.parts)
                written = write_shards(draft, number, copied.shards)
                written = {**note, **written, "files": {**files, **written["files"]}}
                store.disk.put(f"{name}/{NOTE.format(number)}", json.dumps(written).encode())
            if store.leads and self._neighbour is not None:
                for writer in (writer for writer in range(note["writers"]) if store.leader[writer] == rank):
                    files = awaited_note(draft, writer, self._sockets.config.timeout_s)["files"]
                    self._neighbour.send([f"{name}/{file}" for file in (*files, NOTE.format(writer))])
        except Exception as error:  # pickling may raise any exception; the next copy tells the other ranks
            self._why = f"rank {rank} on {store.host[rank]}: {store.disk.reason(error)}"

    def closed(self) -> None:
        """Remove the copies: the run is saved. Collective. Further calls do nothing."""
        self.active = False
        if self._background is not None:
            self._background.close(wait=True)
        if self._store is not None:
            self._ranks.barrier()  # a neighbour may send until then
            self._store.clear()
            self._store = None

    def abandon(self) -> None:
        """Make no more copies, without waiting for the last one."""
        self._sockets.hooks.remove_hook(self)
        if self in self._sockets.ways_back:
            self._sockets.ways_back.remove(self)
        if self._background is not None:
            self._background.close(wait=False)


def _identity(store: Store) -> _Identity | None:
    """Return the identity of the run in a store; None if there is none that can be read."""
    with suppress(OSError, ValueError):
        return _Identity.model_validate_json(store.get(_ID))
    return None


def steps_between(ratio: float) -> int:
    """Return the steps between two copies, given the cost of a copy as a share of a step; 0 if it is not known yet."""
    return math.ceil(ratio / _SHARE) if ratio else _AT_FIRST
