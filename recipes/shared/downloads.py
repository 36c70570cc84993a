"""``downloading``: raises one clear error if a download fails."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import HTTPError

from unitrain import ConfigError

# A server that does not answer within this time is an error.
_TIMEOUT_S = 15.0


@contextmanager
def downloading(what: str, remedy: str) -> Iterator[None]:
    """Raise a ConfigError with a remedy if a download in the block fails.

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
            error.close()  # it is also the response, which holds the connection
        raise ConfigError(f"{what} can't be downloaded: {str(error).rstrip('.')}. {remedy}") from None
    finally:
        socket.setdefaulttimeout(before)
