"""MPI calls of the rendezvous, through mpi4py."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unitrain.errors import BackendError, LaunchError
from unitrain.launch.detect import Launch


@contextmanager
def all_ranks(launch: Launch) -> Iterator[Any]:
    """Yield MPI's communicator of all ranks, and leave MPI as it was. Collective.

    If MPI is not initialised yet, it is finalised again at once. MPI_Finalize waits for all ranks: at exit, it would
    keep a failed rank from ending the job. A script that uses MPI imports mpi4py.MPI before ``unitrain.init``.

    Args:
        launch: how this process was started.

    Raises:
        BackendError: mpi4py is missing, is built for another MPI than the launcher's, or MPI was finalised before.
        LaunchError: MPI sees another world than the launcher's variables describe.
    """
    point_to_installed_mpi()
    try:
        import mpi4py

        # The import would initialise MPI, and finalise it at exit.
        automatic, mpi4py.rc.initialize = mpi4py.rc.initialize, False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            f"mpirun started {launch.world_size} processes, which without Horovod need mpi4py to meet, but it can't "
            f"be imported ({error}). Install it with pip install 'unitrain[mpi]', or start the job with torchrun, or "
            "set MASTER_ADDR and MASTER_PORT (mpirun -x) to an address of rank 0's host."
        ) from error
    mpi4py.rc.initialize = automatic
    library = MPI.Get_library_version()
    if mpi_family(library) != launch.mpi or MPI.Is_finalized():
        # MPI_Get_library_version may be called at any time, even after MPI_Finalize.
        state = "was finalized" if MPI.Is_finalized() else f"is {library.split(',')[0].splitlines()[0]!r}"
        raise BackendError(
            f"the MPI of mpi4py {state}, but the processes were started by the mpirun of {launch.mpi} and need it for "
            "the rendezvous. Start them with the mpirun that belongs to mpi4py, or start the job with torchrun, or set "
            "MASTER_ADDR and MASTER_PORT to an address of rank 0's host."
        )
    # A script that uses MPI itself has initialised it, and finalises it.
    starts = not MPI.Is_initialized()
    if starts:
        ctypes.CDLL(MPI.__file__).MPI_Init(None, None)  # MPI.Init would hold the GIL until all ranks have come
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (launch.rank, launch.world_size):
        raise LaunchError(
            f"according to mpirun this process is rank {launch.rank} of {launch.world_size}, but according to mpi4py "
            f"rank {world.rank} of {world.size}: mpi4py was built for another MPI. Rebuild it with pip install "
            "--force-reinstall --no-cache-dir --no-binary mpi4py mpi4py."
        )
    yield world
    if starts:
        MPI.Finalize()


def broadcast(world: Any, data: bytes | None) -> bytes:
    """Return rank 0's bytes on every rank. Collective. MPI's own broadcast of objects pickles them.

    Args:
        world: MPI's communicator.
        data: the bytes, on rank 0; None on other ranks, which do not know their number.
    """
    # The others need a buffer of the right size, so the number of bytes comes first.
    length = bytearray((len(data or b"")).to_bytes(8, "big"))
    world.Bcast(length)
    buffer = bytearray(data) if data is not None else bytearray(int.from_bytes(length, "big"))
    world.Bcast(buffer)
    return bytes(buffer)


def mpi_family(library: str) -> str:
    """Return the value of ``Launch.mpi`` for an MPI library.

    Args:
        library: the result of MPI_Get_library_version, such as "Open MPI v4.1.6, package: ...".
    """
    if library.startswith("Open MPI v"):
        return "Open MPI 5" if int(library.removeprefix("Open MPI v").split(".")[0]) >= 5 else "Open MPI 4"
    return "MPICH"


def point_to_installed_mpi() -> None:
    """Set the variable by which an Open MPI that was moved finds its files, on hosts other than mpirun's.

    mpirun's daemon on other hosts only sets PMIx's. Without it, MPI_Init aborts a process.
    """
    prefix = os.environ.get("PMIX_INSTALL_PREFIX")
    if prefix:
        os.environ.setdefault("OPAL_PREFIX", prefix)
