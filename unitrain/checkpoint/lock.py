"""Keeps two jobs from saving to one folder: a file in it names the process that does, and shows that it is alive.

File locks are not used: many network file systems have none, or keep them to one host.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from unitrain.checkpoint.reading import open_regular
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

NAME = ".lock"
BEAT_S = 5.0
STALE_S = 30.0
"""The holder of a lock on another host counts as ended if it has not touched the file for this long."""
_POLL_S = 0.5
_LARGEST = 2**12  # bytes


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


class FolderLock:
    """Holds the lock of a folder until ``release``. A thread touches the file every few seconds meanwhile.

    Args:
        folder: it exists.

    Raises:
        CheckpointError: another process holds the lock, or the file can't be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / NAME
        self._own = _this_process()
        self._disk = folder.stat().st_dev
        holder = _read(self._path)
        if holder is not None and self._is_alive(holder):
            raise CheckpointError(
                f"{folder} is in use by {_read(self._path) or holder}: two jobs can't save checkpoints to one folder. "
                "Wait until that job has ended, or stop it, or use another folder."
            )
        self._write(replaces=holder is not None)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="checkpoint lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that this process still holds the lock, before it writes. A folder that is gone is made again.

        Raises:
            CheckpointError: another process has taken the folder, or it was on a disk that is no longer there.
        """
        holder = _read(self._path)
        if holder == self._own:
            return
        if holder is not None:
            raise CheckpointError(
                f"{self._folder} was taken by {holder} while this run was saving to it: two jobs can't save "
                "checkpoints to one folder."
            )
        there = next(path for path in (self._folder, *self._folder.absolute().parents) if path.exists())
        if there.stat().st_dev != self._disk:
            raise CheckpointError(
                f"the disk of {self._folder} is no longer mounted: what is there now is on another. Mount it again, "
                "and resume the run."
            )
        self._write(replaces=False)
        print_stderr(
            f"unitrain: {self._folder} was removed, moved or emptied while this run was going on: it has been made "
            "again, and holds this run's checkpoints from now on."
        )

    def release(self) -> None:
        """Give up the lock."""
        self._released.set()
        self._thread.join()
        with suppress(OSError, CheckpointError):
            if _read(self._path) == self._own:
                self._path.unlink()

    def _write(self, *, replaces: bool) -> None:
        text = self._own.model_dump_json()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if replaces:
                temporary = self._path.with_name(f"{NAME}.{self._own.token}")
                temporary.write_text(text)
                os.replace(temporary, self._path)
            else:
                with suppress(FileExistsError), open(self._path, "x") as file:  # by another process, just now
                    file.write(text)
        except OSError as error:
            raise CheckpointError(f"checkpoints can't be written to {self._folder}: {error}") from error
        if _read(self._path) != self._own:
            raise CheckpointError(f"{self._folder} was taken by another job at the same moment: start one at a time.")

    def _is_alive(self, holder: Holder) -> bool:
        if holder.place != self._own.place:
            return self._is_touched(holder)
        # A checkpoint of this process that was not closed is no longer used: a strategy has only one.
        return holder.pid != self._own.pid and holder.is_running()

    def _is_touched(self, holder: Holder) -> bool:
        """Return whether the file is touched within the next seconds; not if it has not been for long."""
        first = _touched(self._path)
        left = STALE_S - (self._clock() - first)
        if left > 0:
            print_stderr(
                f"unitrain: {self._folder} is locked by {holder}. Waiting for up to {left:.0f} s to see whether that "
                "process is still running."
            )
        end = time.monotonic() + left
        while time.monotonic() < end:
            time.sleep(_POLL_S)
            if _touched(self._path) != first:
                return _read(self._path) is not None
        return False

    def _clock(self) -> float:
        """Return the time according to the file system, whose server may have another than this host."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.write(b"now")
            file.flush()
            return os.fstat(file.fileno()).st_mtime

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with suppress(OSError, CheckpointError):
                if _read(self._path) == self._own:
                    os.utime(self._path)


def _read(path: Path) -> Holder | None:
    """Return the holder of a lock, an unknown one if the file is damaged, or None if there is no file.

    Raises:
        CheckpointError: the file can't be opened.
    """
    try:
        with open_regular(path) as file:
            return Holder.model_validate_json(file.read(_LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}. If no job uses this folder, remove it.") from error
    except ValueError:
        return Holder()


def _touched(path: Path) -> float:
    """Return when a file was last written to, as the server knows: opened, a file is looked up again."""
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return 0.0
