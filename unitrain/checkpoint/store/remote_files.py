"""Files in an object store, or anything else that fsspec knows by a URL, with errors that say what to do.

An object is replaced at once and as a whole, also by an upload in several parts: readers get the old or the new one.
"""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.exceptions import FSTimeoutError
from fsspec.registry import known_implementations

from unitrain.errors import CheckpointError

PATIENCE_S = 120.0
"""How long a server is waited for that does not answer. s3fs has no limit for a PUT that was not accepted."""
_SLOWEST = 2**17  # bytes per second of a copy
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or the role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "hf": "HF_TOKEN, or `hf auth login`",
}
_SAME = {"s3a": "s3", "gcs": "gs"}
_ABOUT_CREDENTIALS = re.compile(r"credential|access ?denied|forbidden|unauthorized|\b40[13]\b", re.IGNORECASE)


class RemoteFiles:
    """The files below a URL, by their names relative to it; "" is the URL itself.

    All methods raise CheckpointError if the store can't be used: retries are those of the library behind fsspec.

    Args:
        url: such as ``s3://bucket/run``.

    Raises:
        CheckpointError: the library for the URL's scheme is not installed, or there is none.
    """

    def __init__(self, url: str) -> None:
        self.url: str = url.rstrip("/")
        self.scheme: str = url.partition("://")[0].lower()
        with self._explained("can't be used"):
            try:
                self._files, self._root = url_to_fs(url)
            except ImportError as error:
                raise CheckpointError(f"{url} needs a library: {self._install()}. ({error})") from error
            except ValueError as error:
                schemes = ", ".join(f"{scheme}://" for scheme in ("s3", "gs", "hf"))
                raise CheckpointError(f"{url} can't be used: {error}. Use {schemes} or a path.") from error

    def _install(self) -> str:
        if self.scheme in _PACKAGES:
            return f"pip install {_PACKAGES[self.scheme]}"
        return str(known_implementations.get(self.scheme, {}).get("err", "install one that fsspec finds"))

    def name(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{name}" if name else self.url

    def read(self, name: str) -> bytes:
        """Return the content of a file, or raise FileNotFoundError."""
        with self._explained("could not be read", name, passes=FileNotFoundError):
            return bytes(self._files.cat_file(self._path(name), **self._limit()))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of a file between two positions, or raise FileNotFoundError."""
        with self._explained("could not be read", name, passes=FileNotFoundError):
            return bytes(self._files.cat_file(self._path(name), start=start, end=end, **self._limit(end - start)))

    def write(self, name: str, data: bytes, *, exclusive: bool = False) -> None:
        """Write a file. If ``exclusive``, it must not exist (FileExistsError), as the server decides."""
        with self._explained("could not be written", name, passes=FileExistsError if exclusive else None):
            mode = "create" if exclusive else "overwrite"
            self._files.pipe_file(self._path(name), data, mode=mode, **self._limit())

    def upload(self, file: Path, name: str) -> None:
        """Copy a file from the disk."""
        with self._explained("could not be written", name):
            self._files.put_file(str(file), self._path(name), **self._limit(file.stat().st_size))

    def download(self, name: str, file: Path) -> None:
        """Copy a file to the disk, or raise FileNotFoundError."""
        size = self.size(name)
        with self._explained("could not be read", name, passes=FileNotFoundError):
            self._files.get_file(self._path(name), str(file), **self._limit(size))

    def names(self, name: str = "") -> list[str]:
        """Return the names in a folder, without their folder; none if there is no such folder."""
        with self._explained("can't be listed", name):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._path(name), detail=False, **self._limit())
            except FileNotFoundError:
                return []
            return [path.rstrip("/").rpartition("/")[2] for path in found]

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, or raise FileNotFoundError."""
        with self._explained("could not be read", name, passes=FileNotFoundError):
            self._files.invalidate_cache()
            return int(self._files.info(self._path(name), **self._limit())["size"])

    def modified(self, name: str) -> float:
        """Return when a file was written, in seconds by the server's clock, or raise FileNotFoundError."""
        with self._explained("could not be read", name, passes=FileNotFoundError):
            self._files.invalidate_cache()
            return float(self._files.modified(self._path(name)).timestamp())

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with self._explained("can't be removed", name):
            try:
                self._files.rm_file(self._path(name), **self._limit())
            except FileNotFoundError:
                return

    def _limit(self, size: int = 0) -> dict[str, float]:
        """Return the time limit of a call that copies ``size`` bytes, for libraries that have one."""
        return {"timeout": PATIENCE_S + size / _SLOWEST} if self._files.async_impl else {}

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else str(self._root)

    @contextmanager
    def _explained(self, what: str, name: str = "", *, passes: type[Exception] | None = None) -> Iterator[None]:
        """Raise all errors as CheckpointError, but for the kind that ``passes``."""
        try:
            yield
        except Exception as error:  # each library has exceptions of its own
            if isinstance(error, passes or CheckpointError):
                raise
            raise CheckpointError(f"{self.name(name)} {what}: {self.reason(error)}") from error

    def reason(self, error: Exception) -> str:
        """Return why a file could not be copied or used, and what to do."""
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            folder = tempfile.gettempdir()
            return f"No space left in {folder}, for temporary files. Free some, or set TMPDIR to a folder elsewhere."
        if isinstance(error, FSTimeoutError):
            return f"the server has not answered, or was slower than {_SLOWEST} bytes/s after {PATIENCE_S:g} s."
        said = f"{type(error).__name__}: {error}".rstrip(".: ")
        if not isinstance(error, PermissionError) and not _ABOUT_CREDENTIALS.search(said):
            return f"{said}."
        source = _CREDENTIALS.get(_SAME.get(self.scheme, self.scheme))
        return f"{said}. Check the credentials{f' ({source})' if source else ''} and what they permit."
