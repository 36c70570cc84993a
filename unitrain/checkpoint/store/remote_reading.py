"""Opens a checkpoint in an object store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unitrain.checkpoint.sharded.shards import PREFIX
from unitrain.checkpoint.store import manifest as manifests
from unitrain.checkpoint.store.download import download
from unitrain.checkpoint.store.folder import Saved
from unitrain.checkpoint.store.manifest import DamagedError, Manifest
from unitrain.checkpoint.store.remote_files import RemoteFiles
from unitrain.checkpoint.weights.mapped import MappedFiles

if TYPE_CHECKING:
    from unitrain.checkpoint.sharded.verifying import JointVerification


def manifest_of(files: RemoteFiles) -> Manifest:
    """Return the manifest of a checkpoint, or raise DamagedError."""
    name = manifests.NAME
    try:
        if files.size(name) > manifests.LARGEST:
            raise DamagedError(f"{files.name(name)} is no manifest: it is too large")
        return manifests.parsed(files.read(name), files.url)
    except FileNotFoundError as error:
        raise DamagedError(f"{files.name(name)} does not exist") from error


def opened(files: RemoteFiles, joint: JointVerification | None = None) -> Saved:
    """Verify and open a checkpoint; with ``joint``, other ranks download files with shards, too.

    Raises:
        DamagedError: a file is missing or changed.
    """
    manifest = manifest_of(files)
    several = {name: one for name, one in manifest.files.items() if name.startswith(PREFIX)} if joint else {}
    found = None if joint is None else joint.download(files, several)
    mapped = MappedFiles() if joint is None or found is None else joint.files
    alone = {name: one for name, one in manifest.files.items() if found is None or name not in several}
    parts = {**download(files, alone, mapped), **(found or {})}
    return Saved.of(manifest, parts, mapped, files.url)
