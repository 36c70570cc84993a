"""The programs that a build or a launch needs, as this environment would find them: compiler, CMake, CUDA, MPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_ASK_SECONDS = 120.0  # a first import of torch over a network's file system takes that long
_GRACE_SECONDS = 5.0
_SHOWN_CHARACTERS = 300

_MPI_VERSIONS = (
    ("Open MPI", re.compile(r"\((?:Open MPI|OpenRTE)\) (\S+)")),
    ("IBM Spectrum MPI", re.compile(r"\(IBM Spectrum MPI\) (\S+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version (\S+(?: Update \d+)?)", re.DOTALL)),
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+(\S+)")),
)


@dataclass(frozen=True)
class Program:
    """An executable and the version that it reports."""

    path: Path
    version: str


@dataclass(frozen=True)
class Mpi:
    """An MPI installation: its launcher, and the compiler wrapper that belongs to it."""

    implementation: str
    """Open MPI, MPICH, Intel MPI, IBM Spectrum MPI, or unknown."""
    version: str
    mpirun: Path
    compiler: Path | None
    """mpicxx of the same folder; None where only the launcher is installed."""

    def __str__(self) -> str:
        return f"{self.implementation} {self.version}".strip()


def search_path() -> str:
    """Return PATH with this environment's own programs first, as if it were activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def find_program(name: str) -> Path | None:
    """Return where ``name`` is found: in this environment first, then on PATH."""
    found = shutil.which(name, path=search_path())
    return Path(found) if found else None


def small_mpi_environment() -> dict[str, str]:
    """Return an environment for a small run: Open MPI (4 and 5) may start more processes than cores, and as root."""
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


def ask(*command: str | Path) -> str | None:
    """Return what ``command`` prints, on either stream; None if it can't be run, fails, or hangs."""
    worked, said = attempt(*command)
    return said if worked else None


def attempt(*command: str | Path, environment: Mapping[str, str] | None = None) -> tuple[bool, str]:
    """Run a quick ``command`` and return whether it succeeded, and what it printed on either stream.

    The default environment is this process's own, with ``search_path`` as PATH.
    """
    try:
        with running([str(part) for part in command], environment or {**os.environ, "PATH": search_path()}) as process:
            said, _ = process.communicate(timeout=_ASK_SECONDS)
    except OSError as error:
        return False, str(error)
    except subprocess.TimeoutExpired:
        return False, f"no end after {_ASK_SECONDS:.0f} s"
    if process.returncode != 0:
        return False, said or f"exit status {process.returncode}"
    return True, said


def run_one(mpi: Mpi, *program: str) -> tuple[bool, str]:
    """Have ``mpi`` run one process of ``program`` here; return whether it succeeded, and its output or the reason."""
    worked, said = attempt(mpi.mpirun, "-np", "1", *program, environment=small_mpi_environment())
    if worked:
        return True, said
    words = " ".join(line.strip() for line in said.splitlines() if line.strip("- "))
    # Open MPI wants one even for processes on this host.
    hint = "; apt-get install openssh-client may be all it needs" if find_program("ssh") is None else ""
    return False, f"{words[:_SHOWN_CHARACTERS] or 'it says nothing'}{hint}"


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run ``command``, its output as one stream of text; an exception in the block ends it and all it started."""
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            yield process
        except BaseException:
            _end_tree(process.pid)
            raise


def _end_tree(pid: int) -> None:
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
        root.terminate()  # a launcher passes it on, in the way its processes expect
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs(family, timeout=_GRACE_SECONDS)
    for process in alive:
        process.kill()


def find_compiler() -> Program | None:
    """Return the C++ compiler that CMake would take: that of CXX, else the first of the usual names."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return _first(names, r"^(.+)$")


def find_cmake() -> Program | None:
    """Return CMake."""
    return _first(["cmake"], r"version (\S+)")


def find_cuda() -> Program | None:
    """Return the folder of CUDA's toolkit: of HOROVOD_CUDA_HOME or CUDA_HOME, of nvcc on PATH, or the usual one."""
    homes = [Path(os.environ[name]) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if os.environ.get(name)]
    if nvcc := find_program("nvcc"):
        homes.append(nvcc.resolve().parent.parent)
    for home in [*homes, Path("/usr/local/cuda")]:
        found = _first([str(home / "bin" / "nvcc")], r"release (\d+\.\d+)")
        if found and (home / "include" / "cuda_runtime.h").is_file():
            return Program(home, found.version)
    return None


def find_mpi() -> Mpi | None:
    """Return the MPI whose ``mpirun`` comes first, or None where there is no ``mpirun`` that works."""
    mpirun = find_program("mpirun")
    if mpirun is None:
        return None
    said = ask(mpirun, "--version")
    if said is None:
        return None
    # Only the wrapper beside mpirun is sure to be of the same MPI; the next one on PATH may be of another.
    wrapper = shutil.which("mpicxx", path=str(mpirun.parent))
    compiler = Path(wrapper) if wrapper else None
    for implementation, pattern in _MPI_VERSIONS:
        if match := pattern.search(said):
            return Mpi(implementation, match[1], mpirun, compiler)
    return Mpi("unknown MPI", "", mpirun, compiler)


def _first(names: list[str], version: str) -> Program | None:
    for name in names:
        path = find_program(name)
        if path is None:
            continue
        said = ask(path, "--version")
        if said is not None:
            match = re.search(version, said, re.MULTILINE)
            return Program(path, match[1] if match else "unknown")
    return None
