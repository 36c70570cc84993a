"""A checkpoint that several ranks write together: each writes a file and describes it, and rank 0 waits for them.

They write in the background, where there are no collectives: descriptions are files, too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unitrain.checkpoint import storage
from unitrain.checkpoint.reading import reason
from unitrain.errors import CheckpointError

_POLL_S = 0.05


def write_own(folder: Path, rank: int, name: str, content: Any) -> None:
    """Write this rank's file, and describe it, or why it could not be written, to rank 0.

    Args:
        folder: the temporary folder of the checkpoint.
        rank: this rank.
        name: of the file, without ending.
        content: tensors and plain data.
    """
    try:
        said: dict[str, Any] = {"files": storage.write_files(folder, {name: content})}
    except Exception as error:  # pickling may raise any exception
        said = {"error": reason(error)}
    description = _description(folder, rank)
    temporary = description.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(said))
        os.replace(temporary, description)
    except OSError:
        return  # nobody can be told: rank 0 waits in vain, and says so


def collect(folder: Path, ranks: Iterable[int], patience_s: float) -> dict[str, Any]:
    """Wait for the files of other ranks, and return what the manifest says of them.

    Args:
        folder: the temporary folder of the checkpoint.
        ranks: the other ranks.
        patience_s: how long to wait for each.

    Raises:
        CheckpointError: a rank could not write its file, or not in time.
    """
    files: dict[str, Any] = {}
    for rank in ranks:
        said = _waited_for(_description(folder, rank), patience_s)
        if said is None:
            raise CheckpointError(f"rank {rank} has not written its shards within timeout_s ({patience_s:g} s)")
        if "error" in said:
            raise CheckpointError(f"rank {rank} could not write its shards: {said['error']}")
        files.update(said["files"])
        _description(folder, rank).unlink()
    return files


def _description(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _waited_for(description: Path, patience_s: float) -> Mapping[str, Any] | None:
    until = time.monotonic() + patience_s
    while True:
        try:
            found: Mapping[str, Any] = json.loads(description.read_text())
        except FileNotFoundError:
            if time.monotonic() > until:
                return None
            time.sleep(_POLL_S)
        else:
            return found
