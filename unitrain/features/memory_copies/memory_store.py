"""Copies of a run's state in the memory of its hosts, and how they become a checkpoint again.

Each copy is a folder of files as a checkpoint has them. Each rank that writes leaves a note that says what its files
are, and puts it last. No rank knows of the others' files: a copy is complete if the hosts together have all notes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from unitrain.checkpoint.hooks import Candidate
from unitrain.checkpoint.sharded.dcp import METADATA
from unitrain.checkpoint.sharded.saving import joined_files
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Draft
from unitrain.checkpoint.store.located import DamagedError, Located, locate
from unitrain.checkpoint.store.store import FOLDER
from unitrain.communication.communicator import Communicator
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

NOTE = "rank-{}.json"
_NOTE = re.compile(r"rank-(\d+)\.json")
_SHM, _CGROUPS = Path("/dev/shm"), Path("/sys/fs/cgroup")
_CHUNK_BYTES = 2**25
_MOST_SETS = 2


class Note(NamedTuple):
    """What a host has of one rank's part of a copy.

    ``saved`` is the step of the newest checkpoint that was saved by then, ``writers`` the number of ranks that have
    written the copy, ``same_job`` whether they were as many as now, with the same settings, and ``files`` the sizes of
    the files, which are all there.
    """

    copy: str
    rank: int
    digest: str
    step: int
    life: int
    saved: int | None
    writers: int
    same_job: bool
    files: dict[str, int]


def memory_folder(setting: str | None = None) -> Path:
    """Return where copies are kept on this host."""
    return Path(setting or (_SHM if os.access(_SHM, os.W_OK) else tempfile.gettempdir()))


def prefix() -> str:
    """Return how the names of this user's folders begin there, one for each run."""
    return f"unitrain-{os.getuid()}-"


def folder_of(location: str, setting: str | None = None) -> Path:
    """Return the folder on this host of a run that saves its checkpoints to a location."""
    return memory_folder(setting) / f"{prefix()}{hashlib.sha256(location.encode()).hexdigest()[:16]}"


def left_copies() -> str:
    """Return which folders this user's runs have in the memory of this host. A job that was killed leaves them."""
    folders, size = sorted(memory_folder().glob(f"{prefix()}*")), 0
    for file in (file for folder in folders for file in folder.rglob("*")):
        with suppress(FileNotFoundError):  # a run replaces its copies
            size += file.stat().st_size
    if not folders:
        return "none"
    shown = ", ".join(map(str, folders))
    return f"{size / 2**30:.1f} GiB in {shown}: remove the folders of runs that are not resumed"


class MemoryStore:
    """The folders in the memory of this job's hosts. Collective.

    ``location`` is where the run saves its checkpoints, and ``folder`` the setting ``memory_copies.folder``.
    """

    def __init__(self, ranks: Communicator, location: str, folder: str | None) -> None:
        root = folder_of(location, folder)
        self._ranks = ranks
        self.disk: Disk = Disk(root, durable=False)  # the folder of this host
        host, seen, why = socket.gethostname(), (0, 0), ""
        try:
            found = self.make()
            seen = found.st_dev, found.st_ino
        except OSError as error:
            why = f"rank {ranks.rank} on {host}: {error}"
        # Ranks in several containers of a host may not see the same folder.
        places = ranks.all_gather_data((host, str(root), seen))
        self.why: str = next(filter(None, ranks.all_gather_data(why)), "")  # a host can't keep copies
        self.host: list[str] = [one[0] for one in places]  # the name of each rank's host
        self.leader: list[int] = [places.index(one) for one in places]  # the first rank on the host of each rank
        self._same_path = len({one[1] for one in places}) == 1

    def make(self) -> os.stat_result:
        """Make this host's folder. Raises OSError if others can use it."""
        root = self.disk.root
        root.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{root} is not a folder of this user only: remove it")
        return found

    def room(self) -> int:
        """Return how many bytes are free: in the folder, on the host, and in the container or job."""
        room = [shutil.disk_usage(self.disk.root).free, psutil.virtual_memory().available]
        with suppress(OSError, IndexError):
            own = _CGROUPS / Path("/proc/self/cgroup").read_text().split("::")[1].split()[0].lstrip("/")
            for group in (own, *own.parents):
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
        holders = self._holders(run, settings)
        found: list[Candidate] = []
        for copy in sorted(holders, key=lambda name: _newness(holders[name]), reverse=True)[:_MOST_SETS]:
            by_rank = holders[copy]
            life, step = _newness(by_rank)
            first = next(iter(next(iter(by_rank.values())).values()))
            if set(by_rank) != set(range(first.writers)) or life < after[0] or step <= after[1]:
                continue
            if (first.saved if first.saved is not None else -1) > after[1]:
                continue  # newer checkpoints were removed from the folder
            located = self._completed(copy, by_rank)
            if located is not None:
                names = dict.fromkeys(self.host[holder] for own in by_rank.values() for holder in own)
                found.append(Candidate(located, f"in the memory of {' and '.join(names)}"))
        return found

    def recalled(self, copy: str, run: str, settings: dict[str, Any]) -> Located | None:
        """Make a copy of this run a checkpoint, and return it on rank 0; None if it is not complete. Collective."""
        by_rank = self._holders(run, settings).get(copy)
        return None if by_rank is None else self._completed(copy, by_rank)

    def _holders(self, run: str, settings: dict[str, Any]) -> dict[str, dict[int, dict[int, Note]]]:
        """Return the notes of a run's copies by copy, by the rank that has written, by the rank that has the files.

        Collective.
        """
        ranks = self._ranks
        leads = self.leader[ranks.rank] == ranks.rank
        own_notes: list[Any] = [tuple(note) for note in self._notes(run, settings)] if leads else []
        holders: dict[str, dict[int, dict[int, Note]]] = {}
        for holder, notes in enumerate(ranks.all_gather_data(own_notes)):
            for note in (Note(*fields) for fields in notes):
                copies = holders.setdefault(note.copy, {}).setdefault(note.rank, {})
                if all(note.digest == other.digest for other in copies.values()):
                    copies[holder] = note
        return holders

    def _notes(self, run: str, settings: dict[str, Any]) -> list[Note]:
        """Return the notes on this host of a run, if their files are there."""
        found = []
        for copy in filter(FOLDER.fullmatch, self.disk.list()):
            for name in self.disk.list(copy):
                match = _NOTE.fullmatch(name)
                if match is None:
                    continue
                with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # what is not one
                    content = self.disk.get(f"{copy}/{name}")
                    note = json.loads(content)
                    about, files = note["about"], {file: int(its["size"]) for file, its in note["files"].items()}
                    if note["run"] != run or any(self.disk.size(f"{copy}/{one}") != files[one] for one in files):
                        continue
                    same_job = about["strategy"] == settings and about["world_size"] == self._ranks.world_size
                    files[name] = len(content)
                    found.append(
                        Note(
                            copy, int(match[1]), hashlib.sha256(content).hexdigest(), int(note["step"]),
                            int(note["life"]), note["saved"], int(note["writers"]), same_job, files,
                        )
                    )  # fmt: skip
        return found

    def _completed(self, copy: str, by_rank: dict[int, dict[int, Note]]) -> Located | None:
        """Give each host the files that it needs, and complete the checkpoint on rank 0's. Collective."""
        ranks = self._ranks
        notes = {rank: next(iter(own.values())) for rank, own in by_rank.items()}
        shards = [name for note in notes.values() for name in note.files if name.endswith(".distcp")]
        # What as many ranks with the same settings read is what they have written themselves.
        same_ranks = (
            self._same_path and len(shards) == ranks.world_size and all(note.same_job for note in notes.values())
        )
        whys = []
        for rank, note in notes.items():
            for name, size in note.files.items():
                readers = {self.leader[rank]} if same_ranks else set(self.leader)
                to = (readers if name.endswith(".distcp") else {0}) - by_rank[rank].keys()
                if to:
                    whys.append(self._send(f"{copy}/{name}", size, next(iter(by_rank[rank])), to))
        metadata = ranks.on_main(lambda: self._complete(copy, len(notes)))
        if metadata:
            whys.append(self._send(f"{copy}/{METADATA}", metadata, 0, set(self.leader) - {0}))
        why = next((one for one in ranks.all_gather_data(next(filter(None, whys), "")) if one), "")
        if why or metadata is None:
            if ranks.is_main and why:
                print_stderr(f"unitrain: skipping the copy {copy} in memory: {why}")
            return None
        return locate(self.disk, copy) if ranks.is_main else None

    def _complete(self, copy: str, writers: int) -> int | None:
        """Write the metadata and the manifest, and return the size of the metadata; None if that is not possible."""
        try:
            notes = [json.loads(self.disk.get(f"{copy}/{NOTE.format(rank)}")) for rank in range(writers)]
            draft = Draft(self.disk, copy)
            files = joined_files(draft, notes)
            draft.complete(notes[0]["step"], notes[0]["about"], files)
            locate(self.disk, copy)
        except (OSError, CheckpointError, DamagedError) as error:
            print_stderr(f"unitrain: skipping the copy {copy} in memory: {error}")
            return None
        return int(files[METADATA]["size"]) if METADATA in files else 0

    def _send(self, name: str, size: int, src: int, to: set[int]) -> str:
        """Send a file from one rank's host to others. Return why that failed here, if it did. Collective."""
        ranks, keeps, whys = self._ranks, self._ranks.rank in to, [""]

        @contextmanager
        def noted() -> Iterator[None]:
            try:
                yield
            except OSError as error:
                whys.append(f"{self.disk.shown(name)} on {self.host[ranks.rank]}: {error}")

        with self.disk.draft(name) as path:
            with noted():
                self.disk.make(os.path.dirname(name))
            for start in range(0, size, _CHUNK_BYTES):
                chunk = torch.zeros(min(_CHUNK_BYTES, size - start), dtype=torch.uint8)
                with noted():
                    if ranks.rank == src:
                        content = self.disk.get(name, start, start + len(chunk))
                        chunk.numpy().data[: len(content)] = content
                chunk = ranks.broadcast(chunk, src)
                with noted():
                    if keeps:
                        with open(path, "ab") as file:
                            file.write(chunk.numpy().data)
            with noted():
                if keeps and len(whys) == 1:
                    self.disk.put(name, path)
        return whys[-1]


def _newness(by_rank: dict[int, dict[int, Note]]) -> tuple[int, int]:
    """Return when a copy was made: in which start of the run, and after which step."""
    note = next(iter(next(iter(by_rank.values())).values()))
    return note.life, note.step
