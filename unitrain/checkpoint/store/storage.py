"""Checkpoints on disk: one folder per step, which exists either completely or not at all.

A folder is written under a temporary name, every file and the folder are synced to the disk, and it is renamed last.
Its manifest contains the size and SHA-256 of every file, and a digest of itself. The newest checkpoint is found by the
names of the folders; there is no other record that could be wrong.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from unitrain.checkpoint.store import manifest as manifests
from unitrain.checkpoint.store.manifest import DamagedError, Described, Manifest
from unitrain.checkpoint.weights.mapped import MappedFiles
from unitrain.checkpoint.weights.reading import open_regular, reason
from unitrain.checkpoint.writing import check_part, write_part
from unitrain.errors import CheckpointError
from unitrain.process import print_stderr

MANIFEST = manifests.NAME
BEST = "best"
_FOLDER = re.compile(r"step-(\d{10})")
_TEMPORARY = re.compile(r"\.step-\d{10}\..*\.tmp")
_ASIDE = ".aside.tmp"
_BLOCK = 2**20


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return root / manifests.folder_name(step)


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def begin(root: Path, step: int) -> Path:
    """Make the temporary folder of a checkpoint, and return it.

    Raises:
        CheckpointError: it can't be made.
    """
    temporary = root / f".{folder_of(root, step).name}.{os.getpid()}.tmp"
    with _errors_of(f"checkpoint {folder_of(root, step)} could not be written", root):
        temporary.mkdir(parents=True)
    return temporary


def write_files(temporary: Path, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Write each part to a file, checked and synced to the disk, and return what the manifest says of the files."""
    files: dict[str, Any] = {}
    with ThreadPoolExecutor(4, "checkpoint files") as threads:
        # A file is checked and synced to the disk while the rest of it is hashed, and the next one is written.
        under_way: list[Future[None]] = []

        def finish(path: Path) -> None:
            under_way.extend([threads.submit(_sync_path, path), threads.submit(check_part, path)])

        for name, value in parts.items():
            path = temporary / f"{name}.pt"
            files[path.name] = write_part(path, value, partial(finish, path))
        for one in under_way:
            one.result()
    return files


def write(
    root: Path,
    step: int,
    parts: Mapping[str, Any],
    about: Mapping[str, Any],
    *,
    begun: Path | None = None,
    others: Callable[[], Mapping[str, Any]] = dict,
) -> Path:
    """Write a checkpoint of ``parts`` (by name: tensors and plain data) and return its folder.

    Args:
        root: the folder of the checkpoints.
        step: number of the step.
        parts: the states by name, each written to a separate file.
        about: plain data for the manifest.
        begun: the temporary folder, if ``begin`` has made it.
        others: waits for the files of other ranks, and returns what the manifest says of them.

    Raises:
        CheckpointError: it could not be written; nothing of it is left.
    """
    final = folder_of(root, step)
    temporary = begin(root, step) if begun is None else begun
    try:
        files = {**write_files(temporary, parts), **others()}
        with open(temporary / MANIFEST, "w") as file:
            file.write(manifests.to_json(step, about, files))
            file.flush()
            _sync(file.fileno())
        _sync_path(temporary)
        # The step may have been saved before, by this run or after resuming.
        aside = _set_aside(final) if os.path.lexists(final) else None
        os.rename(temporary, final)
        _sync_path(root)
        if aside is not None:
            _remove(aside)
    except Exception as error:  # pickling may raise any exception
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"checkpoint {final} could not be written: {_explain(error, root)}") from error
    return final


def take(root: Path, step: int, source: Path) -> None:
    """Copy a complete checkpoint from another folder, unless there is one of this step.

    Raises:
        CheckpointError: it can't be copied; nothing of it is left.
    """
    final = folder_of(root, step)
    if os.path.lexists(final):
        return
    temporary = begin(root, step)
    try:
        for file in source.iterdir():
            shutil.copyfile(file, temporary / file.name)
            _sync_path(temporary / file.name)
        _sync_path(temporary)
        os.rename(temporary, final)
        _sync_path(root)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{source} could not be copied to {final}: {_explain(error, root)}") from error


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


def _explain(error: Exception, root: Path) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        free = shutil.disk_usage(root).free
        return f"No space left on the device of {root}: {free} bytes are free. Earlier checkpoints are intact."
    return reason(error) if isinstance(error, UnpicklingError) else str(error)


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def discard(folder: Path) -> None:
    """Remove a checkpoint atomically: it is renamed first. Of a link, only the link is removed.

    Raises:
        CheckpointError: it can't be removed.
    """
    with _errors_of(f"{folder} can't be removed", folder.parent):
        if os.path.lexists(folder):
            _remove(_set_aside(folder))


def _set_aside(folder: Path) -> Path:
    aside = folder.with_name(f".{folder.name}{_ASIDE}")
    if os.path.lexists(aside):
        _remove(aside)
    os.rename(folder, aside)
    return aside


def _remove(path: Path) -> None:
    """Remove whatever has the name of a checkpoint: a folder, but also a file or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def _errors_of(what: str, root: Path) -> Iterator[None]:
    """Raise errors of the file system as CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {_explain(error, root)}") from error


def recover(root: Path) -> None:
    """Restore a checkpoint that was set aside for a new one of the same step that was not completed.

    Raises:
        CheckpointError: it can't be restored.
    """
    with _errors_of(f"a checkpoint in {root} that was set aside can't be restored", root):
        for aside in root.glob(f".step-*{_ASIDE}"):
            folder = root / aside.name[1 : -len(_ASIDE)]
            if (aside / MANIFEST).exists() and not os.path.lexists(folder):
                os.rename(aside, folder)


def sweep(root: Path) -> None:
    """Remove incomplete checkpoints of killed processes."""
    recover(root)
    with _errors_of(f"{root} can't be listed", root):
        for path in root.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                with suppress(OSError):  # it only takes up space
                    _remove(path)


def point_to_best(root: Path, step: int | None) -> None:
    """Make the link ``best`` lead to the checkpoint of a step, if there is one. Else remove it.

    It is for people: what the best is, the manifests say. So it is no error if the file system has no links.
    """
    link, temporary = root / BEST, root / f".{BEST}.tmp"
    folder = None if step is None else folder_of(root, step)
    try:
        if os.path.lexists(link) and not link.is_symlink():
            raise OSError("there is a file or a folder of this name")
        if folder is None or not folder.exists():
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or os.readlink(link) != folder.name:
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(folder.name)
            os.replace(temporary, link)
    except OSError as error:
        print_stderr(f'unitrain: {link} is not the link to the best checkpoint: {error}. resume("best") needs no link.')


def found(root: Path) -> Iterator[Path]:
    """Yield what has the name of a checkpoint, the newest step first, without verifying it.

    Raises:
        CheckpointError: the folder can't be listed.
    """
    with _errors_of(f"{root} can't be listed", root):
        paths = list(root.iterdir()) if root.is_dir() else []
    yield from sorted((path for path in paths if _FOLDER.fullmatch(path.name)), reverse=True)


def verify_files(folder: Path, files: Mapping[str, Described]) -> None:
    """Verify files of a checkpoint by reading them.

    Raises:
        DamagedError: one is missing or changed.
    """
    for name, expected in files.items():
        verify_file(folder / name, expected, str(folder / name))


Verify = Callable[[Path, Mapping[str, Described]], None]
"""Does what ``verify_files`` does."""


def verify(folder: Path, how: Verify = verify_files) -> Manifest:
    """Verify a checkpoint by reading all of its files, and return its manifest.

    Raises:
        DamagedError: the manifest or a file is missing or changed.
        CheckpointError: its format is that of another version.
    """
    manifest = manifests.read(folder)
    how(folder, manifest.files)
    return manifest


def verify_file(path: Path, expected: Described, name: str) -> None:
    """Verify a file of a checkpoint by reading it.

    Args:
        path: the file.
        expected: what the manifest says of it.
        name: its path or URL, for messages.

    Raises:
        DamagedError: it is missing or changed.
    """
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != expected.size:
                raise DamagedError(f"{name}: {actual} bytes instead of {expected.size}")
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise DamagedError(f"{name}: {error.strerror}") from error
    if digest.hexdigest() != expected.sha256:
        raise DamagedError(f"{name}: its SHA-256 does not match the manifest")


def read(folder: Path, names: Iterable[str], files: MappedFiles, *, shown: str | None = None) -> dict[str, Any]:
    """Return the content of the files of a verified checkpoint. Pickled code in them is refused, and never run.

    Args:
        folder: the checkpoint.
        names: of the files.
        files: loads them.
        shown: path or URL of the checkpoint, for messages. Default: the folder.

    Raises:
        DamagedError: a file is not one of torch's.
        CheckpointError: a file contains more than tensors and plain data.
    """
    parts = {}
    for name in names:
        path = folder / name
        try:
            parts[name.removesuffix(".pt")] = files.load(path)
        except Exception as error:  # torch.load raises many kinds of exceptions for a broken file
            kind = CheckpointError if "GLOBAL" in str(error) else DamagedError  # code is no damage, but an attack
            raise kind(f"{shown or folder}/{name} could not be read: {reason(error)}") from error
    return parts
