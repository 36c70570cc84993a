"""The manifest of a checkpoint: what it contains, the size and SHA-256 of every file, and a digest of itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from unitrain.errors import CheckpointError

NAME = "manifest.json"
SCHEMA = 1
RUN = "_run"
METRICS = "_metrics"
"""Parts of a checkpoint that are not an object's state."""
LARGEST = 2**26
"""Bytes that are read of a manifest."""
FOLDER = re.compile(r"step-(\d{10})(?:\.(\d+))?")
"""The names of the folders of checkpoints: the step, and in an object store how often it had been saved before."""

FileName = Annotated[str, StringConstraints(pattern=r"^[^/\x00]+$")]


def folder_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:010d}"


class DamagedError(Exception):
    """A checkpoint does not match its manifest; the message names the file and the reason."""


class Described(BaseModel):
    """A file of a checkpoint."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """What ``resume`` needs of a manifest."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)

    step: Annotated[int, Field(ge=0)]
    strategy: dict[str, Any]
    """The strategy's settings."""
    config: dict[str, Any]
    """The script's settings."""
    files: dict[FileName, Described]
    best: Annotated[int, Field(ge=0)] | None = None
    """The step of the best checkpoint, when this one was saved."""
    emergency: bool = False
    """Whether it is an emergency checkpoint."""


def to_json(step: int, about: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    """Return the text of a manifest."""
    manifest = {"schema": SCHEMA, "step": step, **about, "files": files}
    return json.dumps({**manifest, "digest": _digest(manifest)}, indent=1)


def parsed(text: bytes, folder: str) -> Manifest:
    """Return the manifest with this text, of a checkpoint at a path or URL.

    Raises DamagedError if the text has changed, and CheckpointError if its format is that of another version.
    """
    path = f"{folder}/{NAME}"
    try:
        found = json.loads(text)
        digest, schema = found.pop("digest"), found["schema"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path}: {type(error).__name__}: {error}") from error
    if digest != _digest(found):
        raise DamagedError(f"{path}: its digest does not match its content")
    if schema != SCHEMA:
        raise CheckpointError(f"{folder} has schema {schema}, but this version of UniTrain reads schema {SCHEMA}.")
    try:
        return Manifest.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DamagedError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
