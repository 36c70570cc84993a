"""Downloads files of a checkpoint: they are verified, and mapped without names."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unitrain.checkpoint.store import storage
from unitrain.checkpoint.store.manifest import DamagedError, Described
from unitrain.checkpoint.store.remote_files import RemoteFiles
from unitrain.checkpoint.weights.mapped import MappedFiles
from unitrain.errors import CheckpointError


def download(files: RemoteFiles, described: Mapping[str, Described], mapped: MappedFiles) -> dict[str, Any]:
    """Download files of a checkpoint, verify them, and return their contents by name, without ending.

    What is mapped stays on the disk until it is no longer used, although the files have no names any more.

    Raises:
        DamagedError: one is missing or changed.
    """
    check_space(sum(file.size for file in described.values()), f"{files.url} can't be read")
    with tempfile.TemporaryDirectory(prefix="unitrain-") as temporary:
        for name, expected in described.items():
            try:
                actual = files.size(name)
                if actual != expected.size:
                    raise DamagedError(f"{files.name(name)}: {actual} bytes instead of {expected.size}")
                files.download(name, Path(temporary, name))
            except FileNotFoundError as error:
                raise DamagedError(f"{files.name(name)} does not exist") from error
            storage.verify_file(Path(temporary, name), expected, files.name(name))
        return storage.read(Path(temporary), described, mapped, shown=files.url)


def check_space(needed: int, what: str) -> None:
    """Check that so many bytes fit into the folder of temporary files.

    Args:
        needed: the number of bytes.
        what: what is not possible otherwise, for the message.
    """
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < needed:
        raise CheckpointError(
            f"{what}: it passes through temporary files in {tempfile.gettempdir()}, and needs at least {needed} bytes "
            f"there, but {free} bytes are free. Free some space, or set TMPDIR to a folder on another disk."
        )
