"""The ranks verify the shards in a checkpoint together, each some files, if all of them see its folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unitrain.checkpoint import manifest as manifests
from unitrain.checkpoint import shards, storage
from unitrain.checkpoint.manifest import DamagedError, Described
from unitrain.checkpoint.reading import open_regular
from unitrain.communicator import Communicator


def _manifest(folder: Path) -> str | None:
    """Return a digest of the manifest in a folder; None if this process sees none."""
    try:
        with open_regular(folder / manifests.NAME) as file:
            return hashlib.sha256(file.read(manifests.LARGEST)).hexdigest()
    except OSError:
        return None


class JointVerification:
    """Rank 0 calls this to verify files, and ``end`` after the last call; meanwhile the others ``serve``.

    A rank verifies the file with its shards, which it reads if there are as many ranks as when it was written. The
    other files are read by rank 0 only, which verifies them.

    Args:
        communicator: the communicator of this process.

    Attributes:
        shared: the files with shards that were verified last, in the order of the ranks that wrote them; None if a rank
            does not see them.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.shared: Sequence[Path] | None = None

    def __call__(self, folder: Path, files: Mapping[str, Described]) -> None:
        """Verify the files of a folder. See ``storage.verify_files``."""
        several = {name: expected for name, expected in files.items() if name.startswith(shards.PREFIX)}
        path = folder.resolve()
        self.shared = None
        storage.verify_files(folder, {name: expected for name, expected in files.items() if name not in several})
        if not several:
            return
        described = {name: one.model_dump() for name, one in several.items()}
        request = {"folder": str(path), "manifest": _manifest(path), "files": described}
        answers = self._communicator.all_gather_data(self._answer(self._communicator.broadcast_data(request)))
        if all(answer["sees"] for answer in answers):
            self.shared = [path / name for name in sorted(several)]
        else:
            storage.verify_files(folder, several)
        for answer in answers:
            if answer["error"] and self.shared is not None:
                raise DamagedError(answer["error"])

    def end(self) -> None:
        """Let the other ranks go on."""
        self._communicator.broadcast_data(None)

    def serve(self) -> None:
        """Verify what rank 0 asks for, until it ends."""
        while (request := self._communicator.broadcast_data(None)) is not None:
            self._communicator.all_gather_data(self._answer(request))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        folder, ranks = Path(request["folder"]), self._communicator
        if _manifest(folder) != request["manifest"]:
            return {"sees": False, "error": None}
        own = {
            name: Described(**expected)
            for number, (name, expected) in enumerate(sorted(request["files"].items()))
            if number % ranks.world_size == ranks.rank
        }
        try:
            storage.verify_files(folder, own)
        except DamagedError as error:
            return {"sees": True, "error": str(error)}
        return {"sees": True, "error": None}
