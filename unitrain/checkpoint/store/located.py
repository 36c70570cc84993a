"""``Located``: a checkpoint in a store, with its manifest, whose files any rank can verify and read by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from unitrain.checkpoint.store import manifest as manifests
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.manifest import DamagedError, Manifest
from unitrain.checkpoint.store.mapped import MappedFiles
from unitrain.checkpoint.store.reading import reason
from unitrain.checkpoint.store.store import Store
from unitrain.errors import CheckpointError

_BLOCK = 2**20


def store_at(place: Path | str) -> Store:
    """Return the store at a path, or at a URL (a str), which is not looked at yet."""
    if isinstance(place, Path):
        return Disk(place)
    from unitrain.checkpoint.store.objects import Objects  # and fsspec

    return Objects(place)


class NotACheckpointError(Exception):
    """What is at a path is no checkpoint; the message says what it is."""


class Located(NamedTuple):
    """A checkpoint that has been found. Only its manifest has been read."""

    store: Store
    folder: str
    """Its folder in the store; "" if it is the store's root."""
    manifest: Manifest

    def __str__(self) -> str:
        return self.store.shown(self.folder)

    @property
    def place(self) -> str:
        """Its absolute path or URL, by which ``checkpoint_at`` finds it in another process."""
        return f"{self.store.location}/{self.folder}".rstrip("/")

    def file_name(self, name: str) -> str:
        """Return the name of one of its files in the store."""
        return f"{self.folder}/{name}" if self.folder else name


def locate(store: Store, folder: str) -> Located:
    """Return the checkpoint in a folder of a store. Raises DamagedError and CheckpointError as ``parsed`` does."""
    name = f"{folder}/{manifests.NAME}" if folder else manifests.NAME
    with _damage(store.shown(name)):
        if store.size(name) > manifests.LARGEST:
            raise DamagedError(f"{store.shown(name)} is too large for a manifest")
        text = store.get(name)
    return Located(store, folder, manifests.parsed(text, store.shown(folder)))


def checkpoint_at(place: Path | str) -> Located:
    """Return the checkpoint at a path, or at a URL (a str).

    Raises:
        NotACheckpointError: there is none.
        DamagedError: its manifest is changed.
        CheckpointError: its format is that of another version, or it can't be read.
    """
    store = store_at(place)
    try:
        names = store.list()
    except FileNotFoundError:
        raise NotACheckpointError("does not exist") from None
    except NotADirectoryError:
        names = []
    except OSError as error:
        raise CheckpointError(f"{store} can't be listed: {store.reason(error)}") from error
    if manifests.NAME not in names:
        inside = max(filter(manifests.FOLDER.fullmatch, names), default=None)
        raise NotACheckpointError(
            "is no checkpoint" if inside is None else f"contains checkpoints, such as {inside}, but is none itself"
        )
    return locate(store, "")


@contextmanager
def verified(found: Located, name: str) -> Iterator[Path]:
    """Verify a file of a checkpoint. Context manager with the path of a local file with its content.

    A mapping of the file outlasts the context.

    Raises:
        DamagedError: the file is missing or changed.
        CheckpointError: it could not be downloaded.
    """
    store, file, expected = found.store, found.file_name(name), found.manifest.files[name]
    shown = store.shown(file)
    with ExitStack() as stack:
        with _damage(shown):
            actual = store.size(file)
            if actual != expected.size:
                raise DamagedError(f"{shown}: {actual} bytes instead of {expected.size}")
            path = stack.enter_context(store.file(file))
            digest = hashlib.sha256()
            with open(path, "rb") as opened:
                while block := opened.read(_BLOCK):
                    digest.update(block)
        if digest.hexdigest() != expected.sha256:
            raise DamagedError(f"{shown}: its SHA-256 does not match the manifest")
        yield path


@contextmanager
def _damage(shown: str) -> Iterator[None]:
    """Raise errors of reading a file as DamagedError: a damaged disk often can't be read at all."""
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedError(f"{shown} does not exist") from error
    except OSError as error:
        raise DamagedError(f"{shown}: {error.strerror}") from error


def unreadable(shown: str, error: Exception) -> Exception:
    """Return the error for a file that torch can't load: code in it is no damage, but an attack."""
    kind = CheckpointError if "GLOBAL" in str(error) else DamagedError
    return kind(f"{shown} could not be read: {reason(error)}")


def read(found: Located, names: Iterable[str], mapped: MappedFiles) -> dict[str, Any]:
    """Verify files of a checkpoint, and return their contents by name, without ending.

    Tensors are read from the disk when they are used. Pickled code is refused, and never run.

    Args:
        found: the checkpoint.
        names: names of the files.
        mapped: loads the files.

    Raises:
        DamagedError: a file is missing, changed, or not one of torch's.
        CheckpointError: a file could not be downloaded, or contains more than tensors and plain data.
    """
    names = list(names)
    store, files = found.store, found.manifest.files
    store.check_space(sum(files[name].size for name in names), f"{found} can't be read")
    contents = {}
    for name in names:
        with verified(found, name) as path:
            try:
                contents[name.removesuffix(".pt")] = mapped.load(path)
            except Exception as error:  # torch.load raises many kinds of exceptions for a broken file
                raise unreadable(store.shown(found.file_name(name)), error) from error
    return contents
