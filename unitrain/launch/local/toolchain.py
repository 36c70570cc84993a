"""Finds the programs that a build or a launch needs: compiler, CMake, CUDA, MPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

PROBE_S = 120.0  # the first import of torch from a network file system takes long
_GRACE_SECONDS = 5.0
_SHOWN_CHARACTERS = 300

_MPI_VERSIONS = (
    ("Open MPI", re.compile(r"\((?:Open MPI|OpenRTE)\) (\S+)")),
    ("IBM Spectrum MPI", re.compile(r"\(IBM Spectrum MPI\) (\S+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version (\S+(?: Update \d+)?)", re.DOTALL)),
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+(\S+)")),
)


@dataclass(frozen=True)
class Mpi:
    """An MPI installation: its launcher and its compiler wrapper.

    Attributes:
        version: as ``mpirun --version`` prints it.
        mpirun: the path of its launcher.
    """

    implementation: str
    """Open MPI, MPICH, Intel MPI, IBM Spectrum MPI, or unknown."""
    version: str
    mpirun: Path
    compiler: Path | None
    """mpicxx in the same folder; None if only the launcher is installed."""

    def __str__(self) -> str:
        return f"{self.implementation} {self.version}".strip()


def search_path() -> str:
    """Return PATH with the programs of this Python environment first, as if it were activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def find_program(name: str) -> Path | None:
    """Return the path of a program, in this Python environment or on PATH; None if it is in neither."""
    program = shutil.which(name, path=search_path())
    return Path(program) if program else None


def installed_version(package: str) -> str | None:
    """Return the version of a Python package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def small_mpi_environment() -> dict[str, str]:
    """Return an environment that lets Open MPI (4 and 5) start more processes than cores, also as root.

    Both are refused by default, but a test or a probe on a small host or in a container needs them.
    """
    return {
        **os.environ,
        "PATH": search_path(),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def run_to_end(
    *command: str | Path, environment: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> tuple[int, str]:
    """Run ``command``, and return its exit code and its output (stdout and stderr).

    Args:
        *command: a program and its arguments.
        environment: its complete environment; None for this process's, with ``search_path`` as PATH.
        timeout_s: time limit in seconds, after which the command and its descendants are ended.

    Returns:
        The exit code, 127 if the command can't be started and 124 if it times out, as in a shell; and the output.
    """
    try:
        with running([str(part) for part in command], environment or {**os.environ, "PATH": search_path()}) as process:
            output, _ = process.communicate(timeout=timeout_s)
    except OSError as error:
        return 127, str(error)
    except subprocess.TimeoutExpired:
        return 124, f"timed out after {timeout_s:.0f} s"
    return process.returncode, output


def output_of(*command: str | Path) -> str | None:
    """Return the output of ``command`` (stdout and stderr); None if it can't be run, fails, or times out."""
    code, output = run_to_end(*command, timeout_s=PROBE_S)
    return None if code else output


def run_one(mpi: Mpi, *program: str) -> tuple[bool, str]:
    """Run one process of ``program`` with mpirun. Return whether it succeeded, and its output or the reason.

    Args:
        mpi: the installation.
        *program: a program and its arguments.
    """
    environment = small_mpi_environment()
    code, output = run_to_end(mpi.mpirun, "-np", "1", *program, environment=environment, timeout_s=PROBE_S)
    if code == 0:
        return True, output
    # Error messages of MPI are framed by lines of dashes.
    words = " ".join(line.strip() for line in output.splitlines() if line.strip("- "))
    # Open MPI needs ssh even for processes on this host.
    hint = "; ssh is missing, which may be the reason: apt-get install openssh-client"
    return False, f"{words[:_SHOWN_CHARACTERS] or f'exit code {code}'}{hint if find_program('ssh') is None else ''}"


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run ``command``, with stdout and stderr as one pipe. An exception in the block ends it and its descendants.

    Args:
        command: a program and its arguments.
        environment: its complete environment; None for this process's.

    Raises:
        OSError: it can't be started.
    """
    # A compiler's output need not be UTF-8.
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            yield process
        except BaseException:
            _end_tree(psutil.Process(process.pid))  # first, since Popen waits for it at the end of its block
            raise


def _end_tree(root: psutil.Process) -> None:
    """End a process and its descendants: with SIGTERM, and those that are left after 5 s with SIGKILL."""
    with suppress(psutil.NoSuchProcess):
        # Listed first: the children of a process that has ended are no longer found through it.
        family = [root, *root.children(recursive=True)]
        root.terminate()  # a launcher forwards it to its processes
        _, alive = psutil.wait_procs(family, timeout=_GRACE_SECONDS)
        for process in alive:
            process.kill()


def find_cuda() -> tuple[Path, str] | None:
    """Return folder and version of the CUDA toolkit: of HOROVOD_CUDA_HOME, CUDA_HOME, nvcc on PATH, or the default."""
    homes = [Path(os.environ[name]) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if os.environ.get(name)]
    if nvcc := find_program("nvcc"):
        # nvcc is in the folder bin of the toolkit, perhaps behind a link.
        homes.append(nvcc.resolve().parent.parent)
    for home in [*homes, Path("/usr/local/cuda")]:
        release = re.search(r"release (\d+\.\d+)", output_of(home / "bin" / "nvcc", "--version") or "")
        if release and (home / "include" / "cuda_runtime.h").is_file():
            return home, release[1]
    return None


def find_mpi() -> Mpi | None:
    """Return the MPI of the first ``mpirun`` on the path; None if it does not work or there is no ``mpirun``."""
    mpirun = find_program("mpirun")
    output = None if mpirun is None else output_of(mpirun, "--version")
    if mpirun is None or output is None:
        return None
    # Only a wrapper in the folder of mpirun is sure to belong to the same MPI.
    wrapper = shutil.which("mpicxx", path=str(mpirun.parent))
    compiler = Path(wrapper) if wrapper else None
    for implementation, pattern in _MPI_VERSIONS:
        if match := pattern.search(output):
            return Mpi(implementation, match[1], mpirun, compiler)
    return Mpi("unknown MPI", "", mpirun, compiler)
