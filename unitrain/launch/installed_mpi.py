"""Where the Open MPI lies that pip has installed."""

import os


def point_to_installed_mpi() -> None:
    """Set the variable by which an Open MPI that was moved finds its files, on hosts other than mpirun's.

    mpirun sets it for the processes of its own host, and its daemon on other hosts only sets that of PMIx. Without it,
    MPI_Init aborts a process.
    """
    prefix = os.environ.get("PMIX_INSTALL_PREFIX")
    if prefix:
        os.environ.setdefault("OPAL_PREFIX", prefix)
