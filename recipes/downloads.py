"""Downloads that fail with one clear message."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import HTTPError

from unitrain import ConfigError

# A server that does not answer is an error after this time.
_TIMEOUT_S = 15.0


@contextmanager
def downloading(what: str, remedy: str) -> Iterator[None]:
    """Raise one error for whatever fails in the block.

    Args:
        what: what the block downloads.
        remedy: another way to get it.

    Raises:
        ConfigError: the download failed.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, HTTPError):
            error.close()  # it is the answer, too, with its connection
        raise ConfigError(f"{what} can't be downloaded: {str(error).rstrip('.')}. {remedy}") from None
    finally:
        socket.setdefaulttimeout(before)
