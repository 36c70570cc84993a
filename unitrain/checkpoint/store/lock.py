"""Keeps two jobs from saving to one folder: a file in it names the process that does, and shows that it is alive.

``Lock`` decides who may save; what a file is differs between a disk (``FolderLock``) and an object store (``Lease``).

File locks are not used: many network file systems have none, or keep them to one host.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from unitrain.checkpoint.weights.reading import open_regular
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

NAME = ".lock"
BEAT_S = 5.0
STALE_S = 30.0
"""The holder of a lock on another host counts as ended if it has not touched the file for this long."""
_POLL_S = 0.5
LARGEST = 2**12
"""Bytes that are read of a lock."""


class Holder(BaseModel):
    """The process that holds a lock."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="forbid")

    host: str = "an unknown host"
    pids: str = ""
    """Where the process id is valid: since which start of the host, and in which PID namespace (container)."""
    pid: Annotated[int, Field(ge=0)] = 0
    started: int = 0
    """When the process was started, in the kernel's ticks: another one may get its id later."""
    token: str = ""
    """Tells apart the locks that one process takes."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def place(self) -> tuple[str, str]:
        """The host, and where on it the process id is valid."""
        return self.host, self.pids

    @classmethod
    def parsed(cls, text: bytes) -> Holder:
        """Return the holder that a lock names, an unknown one if the lock is damaged."""
        try:
            return cls.model_validate_json(text)
        except ValueError:
            return cls()

    def is_running(self) -> bool:
        """Return whether the process, which is on this host, is running."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        found = _state_and_start(self.pid)
        return found is None or (found[0] not in "ZX" and found[1] == self.started)


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Return the state of a process and when it was started; None if it is gone, or of another user and hidden."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name of the program, in parentheses, may contain anything
    return fields[0], int(fields[19])


def _this_process() -> Holder:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    _, started = _state_and_start(os.getpid()) or ("", 0)
    pids = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return Holder(host=socket.gethostname(), pids=pids, pid=os.getpid(), started=started, token=uuid4().hex)


class Lock(ABC):
    """Holds the lock of a folder until ``release``. A thread touches the file every few seconds meanwhile.

    Args:
        folder: path or URL of the folder, for messages.

    Raises:
        CheckpointError: another process holds the lock, or the file can't be written.
    """

    def __init__(self, folder: str) -> None:
        self._name = folder
        self._own = _this_process()
        holder = self._read()
        if holder is not None and self._is_alive(holder):
            raise CheckpointError(
                f"{folder} is in use by {self._read() or holder}: two jobs can't save checkpoints to one folder. "
                f"Wait until that job has ended, or stop it, or use another folder.{self._remedy}"
            )
        self._take(replaces=holder is not None)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="checkpoint lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that this process still holds the lock, before it writes. A folder that is gone is made again.

        Raises:
            CheckpointError: another process has taken the folder, or it was on a disk that is no longer there.
        """
        holder = self._read()
        if holder == self._own:
            return
        if holder is not None:
            raise CheckpointError(
                f"{self._name} was taken by {holder} while this run was saving to it: two jobs can't save "
                "checkpoints to one folder."
            )
        if self._released.is_set():
            raise CheckpointError(f"{self._name} has been closed.")
        self._check_place()
        self._take(replaces=False)
        print_stderr(
            f"unitrain: {self._name} was removed, moved or emptied while this run was going on: it has been made "
            "again, and holds this run's checkpoints from now on."
        )

    def release(self) -> None:
        """Give up the lock. Further calls do nothing."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        with suppress(OSError, CheckpointError):
            if self._read() == self._own:
                self._remove()

    def _take(self, *, replaces: bool) -> None:
        self._write(self._own.model_dump_json().encode(), replaces=replaces)
        if self._read() != self._own:
            raise CheckpointError(f"{self._name} was taken by another job at the same moment: start one at a time.")

    def _is_alive(self, holder: Holder) -> bool:
        if holder.place != self._own.place:
            return self._is_touched(holder)
        # A checkpoint of this process that was not closed is no longer used: a strategy has only one.
        return holder.pid != self._own.pid and holder.is_running()

    def _is_touched(self, holder: Holder) -> bool:
        """Return whether the file is touched within the next seconds; not if it has not been for long."""
        first = self._touched()
        left = STALE_S - (self._clock() - first)
        if left > 0:
            print_stderr(
                f"unitrain: {self._name} is locked by {holder}. Waiting for up to {left:.0f} s to see whether that "
                "process is still running."
            )
        end = time.monotonic() + left
        while time.monotonic() < end:
            time.sleep(_POLL_S)
            if self._touched() != first:
                return self._read() is not None
        return False

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with suppress(OSError, CheckpointError):
                if self._read() == self._own:
                    self._touch()

    @property
    def _remedy(self) -> str:
        return ""

    def _check_place(self) -> None:
        """Raise CheckpointError if the folder must not be made again."""

    @abstractmethod
    def _read(self) -> Holder | None:
        """Return the holder of the lock, an unknown one if the file is damaged, or None if there is no file."""

    @abstractmethod
    def _write(self, text: bytes, *, replaces: bool) -> None:
        """Write the file, unless there is one that it does not replace."""

    @abstractmethod
    def _touch(self) -> None:
        """Change when the file was last written to."""

    @abstractmethod
    def _touched(self) -> float:
        """Return when the file was last written to, in seconds by the clock of where it is; 0 if it is gone."""

    @abstractmethod
    def _clock(self) -> float:
        """Return the time by that clock."""

    @abstractmethod
    def _remove(self) -> None:
        """Remove the file."""


class FolderLock(Lock):
    """The lock of a folder of a file system.

    Args:
        folder: it exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / NAME
        self._disk = folder.stat().st_dev
        super().__init__(str(folder))

    def _check_place(self) -> None:
        there = next(path for path in (self._folder, *self._folder.absolute().parents) if path.exists())
        if there.stat().st_dev != self._disk:
            raise CheckpointError(
                f"the disk of {self._folder} is no longer mounted: what is there now is on another. Mount it again, "
                "and resume the run."
            )

    def _read(self) -> Holder | None:
        return holder_of(self._folder)

    def _write(self, text: bytes, *, replaces: bool) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if replaces:
                temporary = self._path.with_name(f"{NAME}.{self._own.token}")
                temporary.write_bytes(text)
                os.replace(temporary, self._path)
            else:
                with suppress(FileExistsError), open(self._path, "xb") as file:  # by another process, just now
                    file.write(text)
        except OSError as error:
            raise CheckpointError(f"checkpoints can't be written to {self._folder}: {error}") from error

    def _touch(self) -> None:
        os.utime(self._path)

    def _touched(self) -> float:
        # Opened, a file is looked up again on the server.
        try:
            with open_regular(self._path) as file:
                return os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return 0.0

    def _clock(self) -> float:
        # The server of the file system may have another clock than this host.
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.write(b"now")
            file.flush()
            return os.fstat(file.fileno()).st_mtime

    def _remove(self) -> None:
        self._path.unlink()


def holder_of(folder: Path) -> Holder | None:
    """Return the holder of the lock of a folder of a file system, an unknown one if the file is damaged, or None.

    Raises:
        CheckpointError: the file can't be read.
    """
    path = folder / NAME
    try:
        with open_regular(path) as file:
            return Holder.parsed(file.read(LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}. If no job uses this folder, remove it.") from error
