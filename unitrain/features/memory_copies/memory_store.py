"""Copies of a run's state in the memory of its hosts, and how they become a checkpoint again.

Each copy is a folder of files as a checkpoint has them. Each rank that writes leaves a note that says what its files
are, and puts it last. No rank knows of the others' files: a copy is complete if the hosts together have all notes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from xxhash import xxh3_64_hexdigest

from unitrain.checkpoint.hooks import Candidate
from unitrain.checkpoint.sharded.dcp import METADATA
from unitrain.checkpoint.sharded.saving import NOTE, joined_files
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Draft
from unitrain.checkpoint.store.located import Described, FileName, Located, locate, shown_error
from unitrain.checkpoint.store.store import FOLDER
from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import first_reason
from unitrain.communication.state_transfer import broadcast_tensors
from unitrain.errors import listed
from unitrain.process import print_stderr

_NOTE = re.compile(r"rank-(\d+)\.json")
_SHM, _CGROUPS = Path("/dev/shm"), Path("/sys/fs/cgroup")
_MOST_SETS = 2


class Written(BaseModel):
    """The content of a note, which a rank has put beside its files of a copy."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)

    run: str
    step: Annotated[int, Field(ge=0)]
    saved: int | None
    writers: Annotated[int, Field(ge=1)]
    about: dict[str, Any]
    files: dict[FileName, Described]
    pieces: list[Any]


class Note(NamedTuple):
    """A host's record of one rank's part of a copy, whose files are all there.

    Attributes:
        copy: the name of the copy.
        rank: the rank that has written the part.
        saved: the step of the newest checkpoint that was saved by then.
        writers: the number of ranks that have written the copy.
        same_job: whether there were as many ranks as now, with the same settings.
        files: the sizes of the files.
    """

    copy: str
    rank: int
    saved: int | None
    writers: int
    same_job: bool
    files: dict[str, int]


class Part(NamedTuple):
    """One rank's part of a copy, and the ranks on whose hosts it is: at least one."""

    note: Note
    holders: list[int]


def folder_of(location: str, setting: str | None = None) -> Path:
    """Return the folder on this host of a run that saves its checkpoints to a location."""
    parent = setting or (_SHM if os.access(_SHM, os.W_OK) else tempfile.gettempdir())
    return Path(parent, f"unitrain-{os.getuid()}-{xxh3_64_hexdigest(location.encode())}")


class MemoryStore:
    """The folders in the memory of this job's hosts. Collective.

    Args:
        ranks: the communicator of this process.
        location: where the run saves its checkpoints.
        folder: the setting ``memory_copies.folder``.

    Attributes:
        disk: the folder of this host.
        why: the reason why a host can't keep copies; "" if all hosts can.
        host: the name of each rank's host.
        leader: the first rank on the host of each rank.
        leads: whether this rank is the first one on its host.
    """

    def __init__(self, ranks: Communicator, location: str, folder: str | None) -> None:
        root = folder_of(location, folder)
        self._ranks = ranks
        self.disk: Disk = Disk(root, durable=False)
        host, seen, why = socket.gethostname(), (0, 0), ""
        try:
            status = self.make()
            seen = status.st_dev, status.st_ino
        except OSError as error:
            why = f"rank {ranks.rank} on {host}: {error}"
        # Ranks in several containers of a host may not see the same folder.
        places = ranks.all_gather_data((host, str(root), seen))
        self.why: str = first_reason(ranks, why)
        self.host: list[str] = [name for name, *_ in places]
        self.leader: list[int] = [places.index(place) for place in places]
        self.leads: bool = self.leader[ranks.rank] == ranks.rank
        self._same_path = len({path for _, path, _ in places}) == 1

    def make(self) -> os.stat_result:
        """Make this host's folder. Raises OSError if others can use it."""
        root = self.disk.root
        root.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
        status = root.lstat()
        # A stranger could have made the folder in advance, to read the weights or to put others in their place.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{root} is not a folder of this user only: remove it")
        return status

    def room(self) -> int:
        """Return how many bytes are free: in the folder, on the host, and in the container or job."""
        room = [shutil.disk_usage(self.disk.root).free, psutil.virtual_memory().available]
        with suppress(OSError, IndexError):
            innermost = _CGROUPS / Path("/proc/self/cgroup").read_text().split("::")[1].split()[0].lstrip("/")
            for group in (innermost, *innermost.parents):
                with suppress(OSError, ValueError):  # there is no limit
                    used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                    room.append(int((group / "memory.max").read_text()) - int(used["anon"]) - int(used["shmem"]))
        return min(room)

    def keep_only(self, *copies: str) -> None:
        """Remove other copies from this host."""
        for name in self.disk.list():
            if name not in copies:
                self.disk.unmake(name)

    def clear(self) -> None:
        """Remove this host's folder."""
        shutil.rmtree(self.disk.root, ignore_errors=True)

    def recall(self, run: str, after: tuple[int, int], settings: dict[str, Any]) -> list[Candidate]:
        """Make complete copies of this run checkpoints, and return them on rank 0, the newest first. Collective.

        Args:
            run: the run's identity.
            after: start and step of the newest checkpoint in the run's folder. Older copies are left out.
            settings: the strategy's settings.
        """
        copies = self._copies(run, settings)
        candidates: list[Candidate] = []
        for copy in sorted(copies, key=_newness, reverse=True)[:_MOST_SETS]:
            parts, (life, step) = copies[copy], _newness(copy)
            note = next(iter(parts.values())).note
            if life < after[0] or step <= after[1]:
                continue
            if set(parts) != set(range(note.writers)):
                self._skip(copy, f"of {note.writers} parts, there are those of rank {listed(sorted(parts))} only")
            elif note.saved is not None and note.saved > after[1]:  # it is of a run that was given up
                self._skip(copy, f"the checkpoint of step {note.saved}, which it follows, was removed")
            elif (located := self._completed(copy, parts)) is not None:
                names = dict.fromkeys(self.host[holder] for part in parts.values() for holder in part.holders)
                candidates.append(Candidate(located, f"in the memory of {' and '.join(names)}"))
        return candidates

    def recalled(self, copy: str, run: str, settings: dict[str, Any]) -> Located | None:
        """Make a copy of this run a checkpoint, and return it on rank 0; None if it is not complete. Collective."""
        parts = self._copies(run, settings).get(copy)
        return None if parts is None else self._completed(copy, parts)

    def _copies(self, run: str, settings: dict[str, Any]) -> dict[str, dict[int, Part]]:
        """Return the parts of a run's copies on all hosts, by copy and by the rank that has written. Collective."""
        notes: list[Any] = [tuple(note) for note in self._notes(run, settings)] if self.leads else []
        copies: dict[str, dict[int, Part]] = {}
        for holder, of_host in enumerate(self._ranks.all_gather_data(notes)):
            for note in (Note(*fields) for fields in of_host):
                copies.setdefault(note.copy, {}).setdefault(note.rank, Part(note, [])).holders.append(holder)
        return copies

    def _notes(self, run: str, settings: dict[str, Any]) -> Iterator[Note]:
        """Yield the notes on this host of a run, if their files are there; say of others why they are not used."""
        others: set[str] = set()
        for copy in filter(FOLDER.fullmatch, self.disk.list()):
            for name in filter(_NOTE.fullmatch, self.disk.list(copy)):
                try:
                    content = self.disk.get(f"{copy}/{name}")
                    note = Written.model_validate_json(content)
                    files = {file: described.size for file, described in note.files.items()}
                    wrong = [file for file in files if self.disk.size(f"{copy}/{file}") != files[file]]
                    why = f"{wrong[0]} has another size" if wrong else ""
                except (OSError, ValidationError) as error:
                    why = shown_error(error) if isinstance(error, ValidationError) else str(error)
                if why:
                    print_stderr(f"unitrain: skipping a part of a copy in memory: {self.disk}/{copy}/{name}: {why}")
                elif note.run != run:
                    others.add(copy)
                else:
                    about = note.about.get("strategy"), note.about.get("world_size")
                    rank = int(_NOTE.sub(r"\1", name))
                    files[name] = len(content)
                    same_job = about == (settings, self._ranks.world_size)
                    yield Note(copy, rank, note.saved, note.writers, same_job, files)
        if others:
            print_stderr(
                f"unitrain: {self.disk} has copies of another run in memory, up to {max(others, key=_newness)}. They "
                "are not used: the run's folder was emptied, or made again, since then."
            )

    def _completed(self, copy: str, parts: dict[int, Part]) -> Located | None:
        """Give each host the files that it needs, and complete the checkpoint on rank 0's. Collective."""
        ranks = self._ranks
        notes = [part.note for part in parts.values()]
        shards = [name for note in notes for name in note.files if name.endswith(".distcp")]
        # What as many ranks with the same settings read is what they have written themselves.
        same_ranks = self._same_path and len(shards) == ranks.world_size and all(note.same_job for note in notes)
        whys = []
        for rank, (note, holders) in parts.items():
            for name, size in note.files.items():
                readers = {self.leader[rank]} if same_ranks else set(self.leader)
                to = (readers if name.endswith(".distcp") else {0}) - set(holders)
                if to:
                    whys.append(self._send(f"{copy}/{name}", size, holders[0], to))
        metadata = ranks.on_main(lambda: self._complete(copy, len(notes)))
        if metadata:
            whys.append(self._send(f"{copy}/{METADATA}", metadata, 0, set(self.leader) - {0}))
        why = first_reason(ranks, *whys)
        if why or metadata is None:
            if why:
                self._skip(copy, why)
            return None
        return locate(self.disk, copy) if ranks.is_main else None

    def _skip(self, copy: str, why: str) -> None:
        if self._ranks.is_main:
            print_stderr(f"unitrain: skipping the copy {copy} in memory: {why}")

    def _complete(self, copy: str, writers: int) -> int | None:
        """Write the metadata and the manifest, and return the size of the metadata; None if that is not possible."""
        try:
            notes = [json.loads(self.disk.get(f"{copy}/{NOTE.format(rank)}")) for rank in range(writers)]
            draft = Draft(self.disk, copy)
            files = joined_files(draft, notes)
            draft.complete(notes[0]["step"], notes[0]["about"], files)
            locate(self.disk, copy)
        except Exception as error:  # notes that are not as they were written end in many kinds of exceptions
            self._skip(copy, f"{type(error).__name__}: {error}")
            return None
        return int(files[METADATA]["size"]) if METADATA in files else 0

    def _send(self, name: str, size: int, src: int, to: set[int]) -> str:
        """Send a file from one rank's host to other ranks' hosts. Return why that failed here, if it did. Collective.

        A rank that can't read or write the file takes part nevertheless, since the others wait for it.
        """
        ranks, why = self._ranks, ""
        source = torch.zeros(1, dtype=torch.uint8).expand(size)
        target = torch.empty(size, dtype=torch.uint8, device="cpu" if ranks.rank in to else "meta")
        place = self.disk.shown(name)
        try:
            if ranks.rank == src:
                source = torch.from_file(place, shared=False, size=size, dtype=torch.uint8)
        except RuntimeError as error:
            why = f"{place} on {self.host[ranks.rank]}: {error}"
        broadcast_tensors(ranks, [target], [source], src=src)
        try:
            if ranks.rank in to:
                self.disk.make(os.path.dirname(name))
                with self.disk.draft(name) as path:
                    target.numpy().tofile(path)
        except OSError as error:
            why = f"{place} on {self.host[ranks.rank]}: {error}"
        return why


def _newness(copy: str) -> tuple[int, int]:
    """Return when a copy was made, given its name: in which start of the run, and after which step."""
    step, _, life = copy.removeprefix("step-").partition(".")
    return int(life or 0), int(step)
