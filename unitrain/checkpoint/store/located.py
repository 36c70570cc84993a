"""``Located``: a checkpoint in a store, with its manifest. Any rank can verify and read its files by itself.

The manifest says what the checkpoint contains. It has the size and XXH3-128 of every file, and a digest of itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from xxhash import xxh3_128, xxh3_128_hexdigest

from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.store import FOLDER, NAME, Store
from unitrain.checkpoint.store.torch_files import BLOCK, reason
from unitrain.errors import CheckpointError
from unitrain.url import parsed

SCHEMA = 1
RUN = "_run"  # the key of the state of the run itself
FileName = Annotated[str, StringConstraints(pattern=r"^[^/\x00]+$")]


class DamagedError(Exception):
    """A checkpoint does not match its manifest; the message names the file and the reason."""


class Described(BaseModel):
    """A file of a checkpoint."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    size: Annotated[int, Field(ge=0)]
    xxh3: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]  # of 128 bits


class Manifest(BaseModel):
    """The entries of a manifest that ``resume`` needs."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)

    step: Annotated[int, Field(ge=0)]
    strategy: dict[str, Any]  # the strategy's settings
    config: dict[str, Any]  # the script's settings
    files: dict[FileName, Described]
    best: Annotated[int, Field(ge=0)] | None = None  # the step of the best checkpoint, when this one was saved
    features: dict[str, Any] = {}  # plain data of features, by name


def to_json(step: int, about: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    """Return the text of a manifest."""
    manifest = {"schema": SCHEMA, "step": step, **about, "files": files}
    return json.dumps({**manifest, "digest": _digest(manifest)}, indent=1)


def _parsed(text: bytes, folder: str) -> Manifest:
    """Return the manifest with this text, of a checkpoint at a path or URL.

    Raises DamagedError if the text has changed, and CheckpointError if its format is that of another version.
    """
    path = f"{folder}/{NAME}"
    try:
        content = json.loads(text)
        digest, schema = content.pop("digest"), content["schema"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path}: {type(error).__name__}: {error}") from error
    if digest != _digest(content):
        raise DamagedError(f"{path}: its digest does not match its content")
    if schema != SCHEMA:
        raise CheckpointError(f"{folder} has schema {schema}, but this version of UniTrain reads schema {SCHEMA}.")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise DamagedError(f"{path}: {shown_error(error)}") from error


def shown_error(error: ValidationError) -> str:
    """Return the first error of a validation in one line, with its place."""
    first = error.errors(include_url=False)[0]
    return ": ".join([*filter(None, [".".join(map(str, first["loc"]))]), first["msg"]])


def _digest(manifest: Mapping[str, Any]) -> str:
    return xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def store_at(path: Path | str) -> Store:
    """Return the store at a path or a URL, which is not looked at yet."""
    place = parsed(path)
    if isinstance(place, Path):
        return Disk(place)
    from unitrain.checkpoint.store.objects import Objects  # and fsspec

    return Objects(place)


def file_at(path: Path | str) -> tuple[Store, str]:
    """Return the store of the folder that a file is in, given its path or URL, and the file's name."""
    place = parsed(path)
    if isinstance(place, Path):
        return Disk(place.parent), place.name
    folder, _, name = place.rstrip("/").rpartition("/")
    return store_at(folder), name


class NotACheckpointError(Exception):
    """There is no checkpoint at a path; the message says why."""


class Located(NamedTuple):
    """A checkpoint that has been found. Only its manifest has been read."""

    store: Store
    folder: str  # its folder in the store; "" if it is the store's root
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
    name = f"{folder}/{NAME}" if folder else NAME
    with readable(store.shown(name), DamagedError):
        text = store.get(name)
    return Located(store, folder, _parsed(text, store.shown(folder)))


def checkpoint_at(path: Path | str) -> Located:
    """Return the checkpoint at a path or a URL, or raise NotACheckpointError or DamagedError."""
    store = store_at(path)
    try:
        names = store.list()
    except FileNotFoundError:
        raise NotACheckpointError("does not exist") from None
    except NotADirectoryError:
        names = []
    except OSError as error:
        raise CheckpointError(f"{store} can't be listed: {store.reason(error)}") from error
    if NAME not in names:
        inside = max(filter(FOLDER.fullmatch, names), default=None)
        raise NotACheckpointError(
            "is no checkpoint" if inside is None else f"contains checkpoints, such as {inside}, but is none itself"
        )
    return locate(store, "")


@contextmanager
def verified(located: Located, name: str) -> Iterator[Path]:
    """Verify a file of a checkpoint. Context manager with the path of a local file with its content.

    A mapping of the file outlasts the context. A file that is missing or changed is a DamagedError.
    """
    store, file, expected = located.store, located.file_name(name), located.manifest.files[name]
    shown = store.shown(file)
    with ExitStack() as stack:
        with readable(shown, DamagedError):  # a damaged disk often can't be read at all
            actual = store.size(file)
            if actual != expected.size:
                raise DamagedError(f"{shown}: {actual} bytes instead of {expected.size}")
            path = stack.enter_context(store.file(file))
            digest = xxh3_128()
            with open(path, "rb") as opened:
                while block := opened.read(BLOCK):
                    digest.update(block)
        if digest.hexdigest() != expected.xxh3:
            raise DamagedError(f"{shown}: its XXH3-128 does not match the manifest")
        yield path


@contextmanager
def readable(shown: str, kind: type[Exception] = CheckpointError) -> Iterator[None]:
    """Raise errors of reading a file as those of a kind."""
    try:
        yield
    except FileNotFoundError as error:
        raise kind(f"{shown} does not exist") from error
    except OSError as error:
        raise kind(f"{shown} could not be read: {error.strerror or error}") from error


@contextmanager
def intact(shown: str) -> Iterator[None]:
    """Raise errors of reading a checkpoint as a DamagedError, or as a CheckpointError if that is it."""
    try:
        yield
    except (DamagedError, CheckpointError):
        raise
    except Exception as error:  # files that are not as they were written end in many kinds of exceptions
        kind = CheckpointError if "GLOBAL" in str(error) else DamagedError  # code in it is no damage, but an attack
        raise kind(f"{shown} could not be read: {reason(error)}") from error
