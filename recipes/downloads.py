"""Downloads that end in one message where they fail."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import HTTPError

from unitrain import ConfigError

# A server that gives no answer is a failure after this, and not a wait without end.
_TIMEOUT_S = 15.0


@contextmanager
def downloading(what: str, remedy: str) -> Iterator[None]:
    """Turn what goes wrong in the block into one message.

    Args:
        what: what the block gets.
        remedy: how else to get it.

    Raises:
        ConfigError: the block could not get it.
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
