"""Keeps two jobs from saving to one folder: a file in it names the process that does, and shows that it is alive.

File locks are not used: object stores have none, many network file systems neither, or keep them to one host.

Of two jobs that start at the same time, one creates the file: the file system or the server decides. Over the file of a
job that ended without removing it, two may both be let in within the same moment. Then the first of them finds out
before it writes its next manifest, and fails.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Annotated, ClassVar
from uuid import uuid4

import psutil
from pydantic import BaseModel, ConfigDict, Field

from unitrain.checkpoint.store.store import Store
from unitrain.errors import CheckpointError
from unitrain.process import boot_id, print_stderr, start_time

NAME = ".lock"
BEAT_S = 5.0
STALE_S = 30.0  # the holder of a lock on another host counts as ended if it has not touched the file for this long
_POLL_S = 0.5


class Holder(BaseModel):
    """The process that holds a lock."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="forbid")

    host: str = "an unknown host"
    pids: str = ""  # where the process id is valid: since which start of the host, in which PID namespace (container)
    pid: Annotated[int, Field(ge=0)] = 0
    started: int = 0  # when the process was started, in the kernel's ticks: another one may get its id later
    token: str = ""  # tells apart the locks that one process takes

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_running(self) -> bool:
        """Return whether the process, which is on this host, is running."""
        try:
            return start_time(self.pid) == self.started and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.Error):
            return psutil.pid_exists(self.pid)  # another user's may be hidden


def _this_process() -> Holder:
    pids = boot_id()
    if sys.platform == "linux":
        pids += f" {os.readlink('/proc/self/ns/pid')}"
    pid = os.getpid()
    return Holder(host=socket.gethostname(), pids=pids, pid=pid, started=start_time(pid), token=uuid4().hex)


class Lock:
    """Holds the lock of a store until ``release``. A thread renews the file every few seconds meanwhile."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._holder = _this_process()
        store.make()
        holder = holder_of(store)
        if holder is not None and self._is_alive(holder):
            remedy = f" If it was killed, remove {store.shown(NAME)}." if store.few_writes else ""
            raise CheckpointError(
                f"{store} is in use by {holder_of(store) or holder}: two jobs can't save checkpoints to one folder. "
                f"Wait until that job has ended, or stop it, or use another folder.{remedy}"
            )
        self._take(replaces=holder is not None)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="checkpoint lock", daemon=True)
        self._thread.start()

    def check(self) -> bool:
        """Raise CheckpointError unless this process still holds the lock. A folder that is gone is made again.

        Returns:
            Whether the folder was gone.
        """
        holder = holder_of(self._store)
        if holder == self._holder:
            return False
        if holder is not None:
            raise CheckpointError(
                f"{self._store} was taken by {holder} while this run was saving to it: two jobs can't save "
                "checkpoints to one folder."
            )
        if self._released.is_set():
            raise CheckpointError(f"{self._store} has been closed.")
        self._take(replaces=False)
        print_stderr(
            f"unitrain: {self._store} was removed, moved or emptied while this run was going on: it has been made "
            "again, and holds this run's checkpoints from now on."
        )
        return True

    def release(self) -> None:
        """Give up the lock. Further calls do nothing."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        with suppress(OSError, CheckpointError):
            if holder_of(self._store) == self._holder:
                self._store.remove(NAME)

    def _take(self, *, replaces: bool) -> None:
        with self._store.explained(f"checkpoints can't be written to {self._store}"):
            self._store.make()
            with suppress(FileExistsError):  # another process has written it just now
                self._store.put(NAME, self._text, exclusive=not replaces)
        if holder_of(self._store) != self._holder:
            raise CheckpointError(f"{self._store} was taken by another job at the same moment: start one at a time.")

    @property
    def _text(self) -> bytes:
        return self._holder.model_dump_json().encode()

    def _is_alive(self, holder: Holder) -> bool:
        if (holder.host, holder.pids) != (self._holder.host, self._holder.pids):
            return self._store.few_writes or self._is_renewed(holder)
        # A checkpoint of this process that was not closed is no longer used: a strategy has only one.
        return holder.pid != self._holder.pid and holder.is_running()

    def _is_renewed(self, holder: Holder) -> bool:
        """Return whether the file is renewed within the next seconds; not if it has not been for long."""
        first = self._renewed()
        left = min(STALE_S, STALE_S - (self._clock() - first))  # a wrong clock's time, or a restored file's, lies ahead
        if left > 0:
            print_stderr(
                f"unitrain: {self._store} is locked by {holder}. Waiting for up to {left:.0f} s to see whether that "
                "process is still running."
            )
        end = time.monotonic() + left
        while time.monotonic() < end:
            time.sleep(_POLL_S)
            if self._renewed() != first:
                return holder_of(self._store) is not None
        return False

    def _renewed(self) -> float:
        """Return when the file was renewed, in seconds by the clock of where it is; 0 if it is gone."""
        try:
            return self._store.modified(NAME)
        except FileNotFoundError:
            return 0.0

    def _clock(self) -> float:
        """Return the time by that clock: the server of a file system may have another one than this host."""
        name = f"{NAME}.{self._holder.token}"
        self._store.put(name, b"now")
        try:
            return self._store.modified(name)
        finally:
            self._store.remove(name)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with suppress(OSError, CheckpointError):  # the next time may succeed, and check() tells who has the lock
                if not self._store.few_writes and holder_of(self._store) == self._holder:
                    self._store.touch(NAME, self._text)


def holder_of(store: Store) -> Holder | None:
    """Return the holder of the lock of a store, an unknown one if the file is damaged, or None if there is no file."""
    try:
        return Holder.model_validate_json(store.get(NAME))
    except ValueError:
        return Holder()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{store.shown(NAME)} can't be read: {error}. If no job uses this folder, remove it."
        ) from error
