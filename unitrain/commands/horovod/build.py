"""Horovod's released source to a wheel for the torch of this environment: check, fetch, edit, build."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from packaging.version import Version

from unitrain.commands.toolchain import (
    Mpi,
    ask,
    find_cmake,
    find_compiler,
    find_cuda,
    find_program,
    run_one,
    running,
    search_path,
)
from unitrain.errors import BackendError

KNOWN_SDISTS = {"0.28.1": "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"}
"""SHA-256 of the source distributions that this was tried with."""

GPU_VARIABLES = ("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME", "HOROVOD_BUILD_CUDA_CC_LIST")
"""Horovod's own variables that a GPU build listens to; all others are kept from it, for a build that can be cached."""

_OLDEST_CMAKE = Version("3.13")
_BYTES_PER_COMPILER = 2 * 2**30
_SHOWN_LINES = 20


@dataclass(frozen=True)
class Edit:
    """One change to Horovod's source: ``old``, which must stand there exactly once, becomes ``new``."""

    file: str
    old: str
    new: str


_STANDARD = ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)")
_DEVICE = "auto dev = CreateDevice(device_attr);"
_EDITS = (
    # The headers of torch are C++20 by now.
    Edit("CMakeLists.txt", *_STANDARD),
    Edit("horovod/torch/CMakeLists.txt", *_STANDARD),
    # A wheel out of the cache must find the MPI and the torch it is installed beside, not those it was built beside.
    Edit(
        "CMakeLists.txt",
        "project(horovod CXX)\n",
        'project(horovod CXX)\n\nset(CMAKE_BUILD_RPATH "$ORIGIN/../../../..;$ORIGIN/../../torch/lib")\n',
    ),
    # gloo takes the interface that horovodrun chose for its first connections only; for the others it takes that of
    # the host's name, which may be one that no other host reaches, and crashes where the name does not resolve.
    Edit(
        "horovod/common/gloo/gloo_context.cc",
        f"{_DEVICE}\n\n  global_ctx = ",
        f"device_attr.iface = global_context.gloo_iface_;\n  {_DEVICE}\n\n  global_ctx = ",
    ),
)
_CPU_EDITS = (
    # Where there is an nvcc, Horovod insists on GPU operations for a torch that was built with CUDA.
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        "print(False)",
    ),
)


def edits_for(gpu: str | None) -> tuple[Edit, ...]:
    """Return the changes that a build with these GPU operations (None: none) needs."""
    return _EDITS if gpu else _EDITS + _CPU_EDITS


def apply_edits(source: Path, edits: Sequence[Edit]) -> None:
    """Make ``edits`` in the tree ``source``.

    Raises:
        BackendError: A text to be changed is not there exactly once: this source is not the one that was tried.
    """
    for edit in edits:
        path = source / edit.file
        text = path.read_text() if path.is_file() else ""
        if text.count(edit.old) != 1:
            raise BackendError(
                f"This source of Horovod is not as UniTrain's change to it expects: {edit.old.strip()!r} stands "
                f"{text.count(edit.old)} times in {edit.file}, not once, so it was not built. "
                f"Releases that work: {', '.join(KNOWN_SDISTS)}."
            )
        path.write_text(text.replace(edit.old, edit.new))


def check_tools(mpi: Mpi | None, gpu: str | None) -> None:
    """Make sure, before anything is fetched, that the build has what it needs.

    Raises:
        BackendError: Something is missing, too old or unfit; the message names all of it, and how to get it.
    """
    problems = [*_compiler_problems(), *_cmake_problems(), *_mpi_problems(mpi), *(_gpu_problems() if gpu else [])]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise BackendError(f"Horovod can't be built here yet:\n{listed}")


def _compiler_problems() -> Iterator[str]:
    compiler = find_compiler()
    if compiler is None:
        named = f" (CXX is {os.environ['CXX']!r})" if os.environ.get("CXX") else ""
        yield f"no C++ compiler was found{named}: apt-get install g++"
    elif ask(compiler.path, "-std=c++20", "-fsyntax-only", "-include", "concepts", "-x", "c++", os.devnull) is None:
        yield f"{compiler.path} ({compiler.version}) can't compile C++20, as torch needs: use g++ 10 or newer (CXX=…)"
    if find_program("make") is None:
        yield "make was not found: apt-get install make"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield f"Python.h is not in {sysconfig.get_path('include')}: apt-get install python3-dev"


def _cmake_problems() -> Iterator[str]:
    cmake = find_cmake()
    if cmake is None:
        yield "CMake was not found: pip install cmake"
    elif Version(cmake.version) < _OLDEST_CMAKE:
        yield f"CMake {cmake.version} ({cmake.path}) is older than {_OLDEST_CMAKE}: pip install cmake"


def _mpi_problems(mpi: Mpi | None) -> Iterator[str]:
    if mpi is None:
        return
    worked, reason = run_one(mpi, "true")
    if not worked:
        yield f"{mpi} ({mpi.mpirun}) can't start a process: {reason}"
    if mpi.compiler is None:
        yield (
            f"{mpi} is at {mpi.mpirun}, but the mpicxx that belongs to it is not beside it: install its development "
            "package (apt-get install libopenmpi-dev, or libmpich-dev), or build with --without-mpi"
        )


def _gpu_problems() -> Iterator[str]:
    if torch.version.cuda is None:
        yield f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch, or leave out --gpu"
        return
    cuda = find_cuda()
    if cuda is None:
        yield f"no CUDA toolkit (nvcc and headers) was found: install CUDA {torch.version.cuda}'s, set CUDA_HOME to it"
    elif cuda.version.split(".")[0] != torch.version.cuda.split(".")[0]:
        yield (
            f"the toolkit in {cuda.path} is of CUDA {cuda.version}, but torch was built with {torch.version.cuda}: "
            f"set CUDA_HOME to the folder of a CUDA {torch.version.cuda.split('.')[0]} toolkit"
        )
    if not os.environ.get("HOROVOD_NCCL_HOME") and _torch_nccl() is None:
        yield "NCCL's header was not found beside torch: set HOROVOD_NCCL_HOME to a folder with include/nccl.h and lib"


def fetch(version: str, folder: Path, log: Path) -> Path:
    """Download and unpack Horovod's source distribution with pip, and so by the user's pip settings.

    Returns:
        The unpacked tree.

    Raises:
        BackendError: pip could not get it, or it is not the file that this was tried with.
    """
    sha256 = KNOWN_SDISTS.get(version)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"horovod=={version}" + (f" --hash=sha256:{sha256}" if sha256 else "") + "\n")
    # Isolation would fetch a setuptools of its own from source, since --no-binary reaches into it.
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    run_logged(
        pip("download", *options, "--requirement", str(requirements)), log, f"Horovod {version} could not be downloaded"
    )
    with tarfile.open(folder / f"horovod-{version}.tar.gz") as archive:
        # Python's first releases of 3.10 and 3.11 have no filters yet.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder / f"horovod-{version}"


def build(source: Path, label: str, *, mpi: bool, gpu: str | None, log: Path, progress: Callable[[int], None]) -> Path:
    """Compile ``source`` into a wheel.

    Args:
        source: The tree, with its edits made.
        label: Local version that the wheel gets, after the ``+``.
        mpi: Whether to build the MPI controller, besides gloo's.
        gpu: ``"nccl"`` for GPU operations on NCCL.
        log: File that the output is appended to.
        progress: Called with the percentage that is done.

    Raises:
        BackendError: It does not compile; the message holds the first error, and where all of the output is.
    """

    def report(line: str) -> None:
        if percentage := re.match(r"\s*\[\s*(\d+)%\]", line):
            progress(int(percentage[1]))

    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
    command = pip("wheel", "-v", *options, "--wheel-dir", str(source.parent), str(source))
    environment = _build_environment(label, mpi, gpu, source.parent)
    run_logged(command, log, "Horovod did not compile", environment, report)
    (wheel,) = source.parent.glob("*.whl")
    return wheel


def _build_environment(label: str, mpi: bool, gpu: str | None, folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    environment |= {
        "PATH": search_path(),
        "HOROVOD_LOCAL_VERSION": label,
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        # CMake 4 refuses the minimum version that the gloo inside Horovod declares.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    environment.setdefault("MAKEFLAGS", f"-j{_compilers_at_once()}")
    return environment | _gpu_environment(gpu, folder) if gpu else environment


def _gpu_environment(gpu: str, folder: Path) -> dict[str, str]:
    environment = {name: os.environ[name] for name in GPU_VARIABLES if os.environ.get(name)}
    environment |= {"HOROVOD_GPU_OPERATIONS": gpu.upper(), "HOROVOD_NCCL_LINK": "SHARED"}
    if cuda := find_cuda():
        environment["HOROVOD_CUDA_HOME"] = str(cuda.path)
        environment["PATH"] = os.pathsep.join([str(cuda.path / "bin"), search_path()])
    if "HOROVOD_NCCL_HOME" not in environment and (nccl := _torch_nccl()):
        environment["HOROVOD_NCCL_HOME"] = str(_linkable(nccl, folder))
    return environment


def _compilers_at_once() -> int:
    """One for each core, as far as memory goes: compiling against torch's headers takes up to 2 GB."""
    return max(1, min(len(os.sched_getaffinity(0)), psutil.virtual_memory().available // _BYTES_PER_COMPILER))


def _torch_nccl() -> Path | None:
    """Return the folder of the NCCL that came with torch, from the package nvidia-nccl-cu…, if it has headers."""
    home = Path(torch.__file__).parent.parent / "nvidia" / "nccl"
    return home if (home / "include" / "nccl.h").is_file() else None


def _linkable(nccl: Path, folder: Path) -> Path:
    """Return a copy of the folder ``nccl``, by links, that a linker can use: the package has no plain libnccl.so."""
    home = folder / "nccl"
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(nccl / "include")
    (home / "lib" / "libnccl.so").symlink_to(nccl / "lib" / "libnccl.so.2")
    return home


def pip(*arguments: str) -> list[str]:
    """Return the command that runs this environment's pip."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def run_logged(
    command: Sequence[str],
    log: Path,
    failure: str,
    environment: dict[str, str] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Run ``command``, append what it says to ``log``, and hand each line of it to ``report``.

    Raises:
        BackendError: It failed; the message is ``failure``, the lines that matter, and the log's path.
    """
    lines = []
    with log.open("a") as file, running(command, environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            lines.append(line.rstrip())
            report(line)
    if process.returncode != 0:
        shown = "\n".join(f"    {line[:300]}" for line in _lines_that_matter(lines))
        raise BackendError(f"{failure}:\n{shown}\n  All of the output is in {log}")


def _lines_that_matter(lines: list[str]) -> list[str]:
    """Return the lines from the first error on, which the many that follow from it would hide; else the last ones."""
    error = re.compile(r"\berror\b\s*:|\bCMake Error\b|^ERROR:|\bfatal\b", re.IGNORECASE)
    first = next((number for number, line in enumerate(lines) if error.search(line)), len(lines) - _SHOWN_LINES)
    return lines[max(0, first) :][:_SHOWN_LINES]
