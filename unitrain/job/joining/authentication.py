"""Authentication: before they exchange anything else, the ranks prove to one another that they know the job's secret.

The secret comes from the variable UNITRAIN_JOB_SECRET; else, if all ranks are on one host, from a file that only this
user can read; else from MPI, if it started the ranks, or from torchrun's store. Ranks that share no secret exchange
plain data only.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

import torch

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.errors import ConfigError, listed
from unitrain.launch.detect import Launch
from unitrain.launch.rendezvous import shared_secret

SECRET = "UNITRAIN_JOB_SECRET"

_BYTES = 32
_FEWEST_CHARACTERS = 16
_REMEDY = f"Set it to the same random string on every host (export {SECRET}=$(openssl rand -hex 32))."
# Other systems than Linux have no folder in memory.
_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(gettempdir())


class JobKey(NamedTuple):
    """The key of a job, derived from the job's secret and random bytes of each rank, and so new in each job."""

    value: bytes
    is_secret: bool
    """Whether the ranks share a secret. Otherwise, a program that has followed their collectives has the key too."""


def authenticate(
    communicator: Communicator, backend: Backend, launch: Launch, timeout_s: float, environ: Mapping[str, str]
) -> JobKey:
    """Agree on the job's key, and check that every rank knows the job's secret. Collective.

    Args:
        communicator: connects the ranks. Until this returns, another program may be one of them.
        backend: the started backend, which says whether the ranks it connects are known to be the launcher's.
        launch: how this process was started.
        timeout_s: how long to wait for the launcher's store, in seconds.
        environ: the environment, which may have UNITRAIN_JOB_SECRET.

    Returns:
        The same key on every rank. It is no secret if the ranks share none.

    Raises:
        ConfigError: the secret is too short, is set on some ranks only, or differs between them.
    """
    given = environ.get(SECRET, "")
    if given and len(given) < _FEWEST_CHARACTERS:
        raise ConfigError(
            f"{SECRET} has {len(given)} characters, but needs {_FEWEST_CHARACTERS}, or it can be guessed. {_REMEDY}"
        )
    nonce = secrets.token_bytes(_BYTES)
    # The ranks of one host can share a file that only their user can read.
    in_file = not given and launch.local_world_size == launch.world_size
    with _written(_file_of(nonce)) if in_file and communicator.is_main else nullcontext():
        nonces = _exchange(communicator, nonce, has_variable=bool(given))
        if given:
            secret: bytes | None = given.encode(errors="surrogateescape")
        elif in_file:
            secret = _read(_file_of(nonces[:_BYTES]))
        # MPI connects the launcher's processes only, so that rank 0 may send the secret itself.
        elif backend.authenticated:
            secret = communicator.broadcast(_tensor(secrets.token_bytes(_BYTES))).numpy().tobytes()
        else:
            secret = shared_secret(launch, timeout_s)
        is_known = communicator.all_reduce(torch.tensor(secret is not None), "min").item()
    # Without a secret the key still tells this job from another at the same address.
    if secret is None or not is_known:
        return JobKey(hmac.digest(b"", nonces, "sha256"), is_secret=False)
    key = hmac.digest(secret, nonces, "sha256")
    _check_proofs(communicator, key)
    return JobKey(key, is_secret=True)


def _exchange(communicator: Communicator, nonce: bytes, *, has_variable: bool) -> bytes:
    """Gather the random bytes that all ranks have drawn. Check that all ranks or none have the variable. Collective.

    Returns:
        The nonces of all ranks, in order.
    """
    # In one call with the nonces: a rank without the variable would take another way from here on, and wait there.
    gathered = communicator.all_gather(_tensor(bytes([has_variable]) + nonce))
    lacking = [rank for rank, has in enumerate(gathered[:, 0].tolist()) if not has]
    if 0 < len(lacking) < communicator.world_size:
        raise ConfigError(
            f"{SECRET} is set on some ranks, but not on rank {listed(lacking)}: ranks share their secret. {_REMEDY}"
        )
    return gathered[:, 1:].contiguous().numpy().tobytes()


def _check_proofs(communicator: Communicator, key: bytes) -> None:
    """Check that each rank can sign its number with the key. Collective, and raises ConfigError on every rank."""
    # Over the rank, so that a stranger can't send back what another rank has signed.
    signature = hmac.digest(key, f"rank {communicator.rank}".encode(), "sha256")
    proofs = [row.numpy().tobytes() for row in communicator.all_gather(_tensor(signature))]
    wrong = [
        rank
        for rank, proof in enumerate(proofs)
        if not hmac.compare_digest(proof, hmac.digest(key, f"rank {rank}".encode(), "sha256"))
    ]
    if wrong:
        raise ConfigError(
            f"rank {listed(wrong)} did not prove to rank {communicator.rank} that it knows the secret of this job: "
            f"{SECRET} differs, or another program has taken that rank's place (SECURITY.md). {_REMEDY}"
        )


def _tensor(data: bytes) -> torch.Tensor:
    """Return bytes as a tensor of dtype uint8, which every backend can gather."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _file_of(nonce: bytes) -> Path:
    """Return the path of the file with the job's secret. Rank 0's nonce, which no other program can guess, names it."""
    return _MEMORY / f"unitrain-{nonce.hex()}"


@contextmanager
def _written(file: Path) -> Iterator[None]:
    """Write a new secret into a file that only this user can read, and remove it in the end."""
    with suppress(OSError), open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as opened:
        opened.write(secrets.token_bytes(_BYTES))  # if it can't be written, the ranks share none
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _read(file: Path) -> bytes | None:
    """Return the secret in a file; None if this user has not written it, or others can read it."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            # The open file is checked, and not the path, which another user could replace in between.
            status = os.fstat(opened.fileno())
            mine = status.st_uid == os.geteuid() and status.st_nlink == 1 and status.st_mode == stat.S_IFREG | 0o600
            return opened.read() if mine and status.st_size == _BYTES else None
    except OSError:
        return None
