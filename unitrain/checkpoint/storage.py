"""Checkpoints on disk: one folder per step, which exists either completely or not at all.

A folder is written under a temporary name, every file and the folder are synced to the disk, and it is renamed last.
Its manifest contains the size and SHA-256 of every file, and a digest of itself. The newest checkpoint is found by the
names of the folders; there is no other record that could be wrong.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from unitrain.errors import CheckpointError

MANIFEST = "manifest.json"
SCHEMA = 1
_FOLDER = re.compile(r"step-(\d{10})")
_TEMPORARY = re.compile(r"\.step-\d{10}\..*\.tmp")
_ASIDE = ".aside.tmp"
_BLOCK = 2**20


class _Hashing:
    """A file that computes the digest and the size of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None
        """The error of a write, which torch's writer replaces by another."""

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


class DamagedError(Exception):
    """A checkpoint does not match its manifest; the message names the file and the reason."""


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return root / f"step-{step:010d}"


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def write(root: Path, step: int, parts: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
    """Write a checkpoint of ``parts`` (by name: tensors and plain data) and return its folder.

    Args:
        root: the folder of the checkpoints.
        step: number of the step.
        parts: the states by name, each written to a separate file.
        about: plain data for the manifest.

    Raises:
        CheckpointError: it could not be written; nothing of it is left.
    """
    final = folder_of(root, step)
    temporary = root / f".{final.name}.{os.getpid()}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        files = {f"{name}.pt": _write_part(temporary / f"{name}.pt", value) for name, value in parts.items()}
        manifest = {"schema": SCHEMA, "step": step, **about, "files": files}
        manifest["digest"] = _digest(manifest)
        with open(temporary / MANIFEST, "w") as file:
            json.dump(manifest, file, indent=1)
            _sync(file.fileno())
        _sync_folder(temporary)
        # The step may have been saved before, by this run or after resuming.
        aside = _set_aside(final) if final.exists() else None
        os.rename(temporary, final)
        _sync_folder(root)
        if aside is not None:
            shutil.rmtree(aside)
    except (OSError, RuntimeError, pickle.PicklingError, TypeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"checkpoint {final} could not be written: {_explain(error, root)}") from error
    return final


def probe(root: Path, needed: int) -> None:
    """Check that a checkpoint can be written, at the start and not hours later.

    Args:
        root: the folder of the checkpoints; it is created.
        needed: minimum size of a checkpoint in bytes.

    Raises:
        CheckpointError: the folder can't be created or written to, or has too little space.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(bytes(_BLOCK))
            _sync(file.fileno())
        free = shutil.disk_usage(root).free
    except OSError as error:
        raise CheckpointError(f"checkpoints can't be written to {root}: {_explain(error, root)}") from error
    if free < needed:
        raise CheckpointError(
            f"checkpoints can't be written to {root}: one needs at least {needed} bytes, but {free} bytes are free. "
            "Free some space, or use a folder on another disk."
        )


def _write_part(path: Path, value: Any) -> dict[str, Any]:
    with open(path, "wb") as file:
        hashing = _Hashing(file)
        try:
            torch.save(value, hashing)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise hashing.error or error from error
        file.flush()
        _sync(file.fileno())
    return {"size": hashing.size, "sha256": hashing.digest.hexdigest()}


def _explain(error: Exception, root: Path) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        free = shutil.disk_usage(root).free
        return f"No space left on the device of {root}: {free} bytes are free. Earlier checkpoints are intact."
    return str(error)


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(folder: Path) -> None:
    """Remove a checkpoint atomically: it is renamed first."""
    if folder.exists():
        shutil.rmtree(_set_aside(folder))


def _set_aside(folder: Path) -> Path:
    aside = folder.with_name(f".{folder.name}{_ASIDE}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    return aside


def recover(root: Path) -> None:
    """Restore a checkpoint that was set aside for a new one of the same step that was not completed."""
    if root.is_dir():
        for aside in root.glob(f".step-*{_ASIDE}"):
            folder = root / aside.name[1 : -len(_ASIDE)]
            if (aside / MANIFEST).exists() and not folder.exists():
                os.rename(aside, folder)


def sweep(root: Path) -> None:
    """Remove incomplete checkpoints of killed processes."""
    recover(root)
    if root.is_dir():
        for path in root.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def prune(root: Path, keep: int) -> None:
    """Remove the oldest checkpoints beyond ``keep``."""
    for folder in list(found(root))[keep:]:
        discard(folder)


def found(root: Path) -> Iterator[Path]:
    """Yield the folders of checkpoints, the newest step first, without verifying them."""
    if root.is_dir():
        yield from sorted((p for p in root.iterdir() if _FOLDER.fullmatch(p.name)), reverse=True)


def verify(folder: Path) -> dict[str, Any]:
    """Verify a checkpoint by reading all of its files, and return its manifest.

    Raises:
        DamagedError: the manifest or a file is missing or changed.
        CheckpointError: its format is that of another version.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        digest = manifest.pop("digest")
        files = manifest["files"]
        schema = manifest["schema"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder / MANIFEST}: {type(error).__name__}: {error}") from error
    if digest != _digest(manifest):
        raise DamagedError(f"{folder / MANIFEST}: its digest does not match its content")
    if schema != SCHEMA:
        raise CheckpointError(f"{folder} has schema {schema}, but this version of UniTrain reads schema {SCHEMA}.")
    for name, expected in files.items():
        _verify_file(folder / name, expected["size"], expected["sha256"])
    return manifest


def _verify_file(path: Path, size: int, sha256: str) -> None:
    try:
        actual = path.stat().st_size
        if actual != size:
            raise DamagedError(f"{path}: {actual} bytes instead of {size}")
        with open(path, "rb") as file:
            digest = hashlib.sha256()
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from error
    if digest.hexdigest() != sha256:
        raise DamagedError(f"{path}: its SHA-256 does not match the manifest")


def read(folder: Path, names: Mapping[str, Any]) -> dict[str, Any]:
    """Load the files of a verified checkpoint on the CPU. Pickled code in them is refused, and never run.

    Raises:
        CheckpointError: a file contains more than tensors and plain data.
    """
    parts = {}
    for name in names:
        try:
            parts[name.removesuffix(".pt")] = torch.load(folder / name, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{folder / name} contains pickled code, which is never run: {error}") from error
    return parts


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
