"""A checkpoint that several ranks write together: each writes a file and describes it, and rank 0 waits for them.

They write in the background, where there are no collectives: descriptions are files, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from unitrain.checkpoint.store.folder import Draft, Folder
from unitrain.checkpoint.store.reading import reason
from unitrain.communication.communicator import Communicator
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

T = TypeVar("T")
_POLL_S, _LONGEST_POLL_S = 0.05, 1.0


def begin(communicator: Communicator, folder: Folder, step: int) -> Draft | None:
    """Begin a checkpoint, and return its place as this rank sees it; None if rank 0 has to write it alone. Collective.

    Raises:
        CheckpointError: rank 0 can't begin it.
    """
    begun: Draft | None = None

    def place() -> list[str] | None:
        nonlocal begun
        begun = folder.begin(step)
        return None if begun is None else begun.place

    found = communicator.on_main(place)
    if found is None:
        return None
    why = ""
    if not communicator.is_main:
        try:
            begun = folder.join(found)
        except CheckpointError as error:
            why = str(error)
    answers = communicator.all_gather_data([begun is not None, why])
    reasons = [f"rank {rank} can't write: {said}" for rank, (_, said) in enumerate(answers) if said]
    if reasons and communicator.is_main:
        print_stderr(f"unitrain: rank 0 gathers all shards and writes them alone, since {reasons[0]}")
    return begun if all(sees for sees, _ in answers) else None


def write_own(begun: Draft, rank: int, name: str, content: Any) -> None:
    """Write this rank's file, and describe it, or why it could not be written, to rank 0.

    Args:
        begun: the checkpoint.
        rank: this rank.
        name: of the file, without ending.
        content: tensors and plain data.
    """
    try:
        said: dict[str, Any] = {"files": begun.write({name: content})}
    except Exception as error:  # pickling may raise any exception
        said = {"error": reason(error)}
    with suppress(OSError, CheckpointError):  # nobody can be told: rank 0 waits in vain, and says so
        begun.tell(rank, json.dumps(said))


def collect(begun: Draft, ranks: Iterable[int], patience_s: float) -> dict[str, Any]:
    """Wait for the files of other ranks, and return what the manifest says of them.

    Args:
        begun: the checkpoint.
        ranks: the other ranks.
        patience_s: how long to wait for each.

    Raises:
        CheckpointError: a rank could not write its file, or not in time.
    """
    files: dict[str, Any] = {}
    for rank in ranks:
        text = waited_for(lambda rank=rank: begun.told(rank), patience_s)  # type: ignore[misc]
        if text is None:
            raise CheckpointError(f"rank {rank} has not written its shards within timeout_s ({patience_s:g} s)")
        said = json.loads(text)
        if "error" in said:
            raise CheckpointError(f"rank {rank} could not write its shards: {said['error']}")
        files.update(said["files"])
    return files


def waited_for(read: Callable[[], T | None], patience_s: float) -> T | None:
    """Return what ``read`` returns once that is not None; None if it takes longer than ``patience_s``."""
    until, pause = time.monotonic() + patience_s, _POLL_S
    while (found := read()) is None and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_S)
    return found
