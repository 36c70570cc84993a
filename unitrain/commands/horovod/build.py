"""Builds a wheel of Horovod for the installed torch: checks the tools, downloads, patches and compiles the source."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from unitrain.errors import BackendError
from unitrain.launch.local.toolchain import Mpi, find_cuda, find_program, run_one, running, search_path
from unitrain.process import usable_cores

VERSION = "0.28.1"
"""The version of Horovod that the edits are for, the last one."""
_SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

_BYTES_PER_COMPILER = 2 * 2**30
_SHOWN_LINES = 20


class Edit(NamedTuple):
    """One change of Horovod's source: replaces ``old``, which must occur exactly once, with ``new``.

    Attributes:
        file: the path of the file in the source tree.
        old: the text to replace.
        new: the text to put in its place.
    """

    file: str
    old: str
    new: str


_STANDARD = ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)")
_DEVICE = "auto dev = CreateDevice(device_attr);"
_EDITS = (
    # The headers of torch need C++20.
    Edit("CMakeLists.txt", *_STANDARD),
    Edit("horovod/torch/CMakeLists.txt", *_STANDARD),
    # A cached wheel must find the MPI and torch of the environment that it is installed in. Horovod and its gloo lack
    # includes of headers that those of GCC before 13 included themselves.
    Edit(
        "CMakeLists.txt",
        "project(horovod CXX)\n",
        'project(horovod CXX)\n\nset(CMAKE_BUILD_RPATH "$ORIGIN/../../../..;$ORIGIN/../../torch/lib")\n'
        'add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-include cstdint -include string>")\n',
    ),
    # GCC 14 refuses the assignment to it in a template that nothing uses.
    Edit(
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        "  const size_type count_;\n",
        "  size_type count_;\n",
    ),
    # Python 3.12 has no distutils, and setuptools' takes its place only where its .pth file is read.
    Edit(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
    ),
    # gloo uses the network interface chosen by horovodrun for its first connections only. For others it uses the
    # interface of the host name, which other hosts may not reach, and crashes if the name does not resolve.
    Edit(
        "horovod/common/gloo/gloo_context.cc",
        f"{_DEVICE}\n\n  global_ctx = ",
        f"device_attr.iface = global_context.gloo_iface_;\n  {_DEVICE}\n\n  global_ctx = ",
    ),
)
_CPU_EDITS = (
    # If nvcc is installed, Horovod requires GPU operations for a torch that was built with CUDA.
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        "print(False)",
    ),
)


def edits_for(gpu: str | None) -> tuple[Edit, ...]:
    """Return the changes that a build needs.

    Args:
        gpu: "nccl" for a build with GPU operations; None for a CPU build.
    """
    return _EDITS if gpu else _EDITS + _CPU_EDITS


def apply_edits(source: Path, edits: Sequence[Edit]) -> None:
    """Apply ``edits`` to a source tree.

    Args:
        source: the root of the tree.
        edits: the changes, in order.

    Raises:
        BackendError: a change does not match.
    """
    for edit in edits:
        path = source / edit.file
        content = path.read_text() if path.is_file() else ""
        if content.count(edit.old) != 1:
            raise BackendError(
                f"UniTrain's patch does not apply to this source of Horovod: {edit.old.strip()!r} occurs "
                f"{content.count(edit.old)} times in {edit.file}, and not once, so it was not built."
            )
        path.write_text(content.replace(edit.old, edit.new))


def check_tools(mpi: Mpi | None, gpu: str | None) -> None:
    """Check that the tools for the build are there.

    Args:
        mpi: the MPI to build with; None for a build without.
        gpu: as in ``edits_for``.

    Raises:
        BackendError: some are missing. The message says of each how to install it.
    """
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    headers = sysconfig.get_path("include")
    present = {
        f"no C++ compiler was found ({', '.join(compilers)}): apt-get install g++": any(map(find_program, compilers)),
        "make was not found: apt-get install make": find_program("make"),
        "CMake was not found: pip install cmake": find_program("cmake"),
        f"Python.h is not in {headers}: apt-get install python3-dev": Path(headers, "Python.h").is_file(),
    }
    # All problems at once, so that one round of installing is enough.
    problems = [problem for problem, is_present in present.items() if not is_present]
    if mpi is not None:
        succeeded, reason = run_one(mpi, "true")
        if not succeeded:
            problems.append(f"{mpi} ({mpi.mpirun}) can't start a process: {reason}")
        if mpi.compiler is None:
            problems.append(
                f"{mpi} is installed ({mpi.mpirun}), but its mpicxx is missing: install its development package "
                "(apt-get install libopenmpi-dev, or libmpich-dev), or use --without-mpi"
            )
    if gpu is not None and torch.version.cuda is None:
        problems.append(f"torch {torch.__version__} was built without CUDA: install a CUDA build, or use --gpu none")
    elif gpu is not None:
        _, version = find_cuda() or (None, "")
        major = str(torch.version.cuda).split(".")[0]
        if version.split(".")[0] != major:
            problems.append(
                f"torch was built with CUDA {torch.version.cuda}, but the toolkit (nvcc, headers) is "
                f"{f'for CUDA {version}' if version else 'missing'}: set CUDA_HOME to CUDA {major}"
            )
    if problems:
        raise BackendError("\n  - ".join(["Horovod can't be built here:", *problems]))


def fetch(folder: Path, log: Path) -> Path:
    """Download Horovod's source distribution with the user's pip settings, and return its unpacked source tree.

    Args:
        folder: an empty folder for the download.
        log: the file that pip's output is appended to.

    Raises:
        BackendError: pip has failed, or has found another file than the known one.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"horovod=={VERSION} --hash=sha256:{_SDIST_SHA256}\n")
    # With build isolation, --no-binary would also make pip download setuptools from source.
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    download = pip("download", *options, "--requirement", str(requirements))
    run_logged(download, log, f"Horovod {VERSION} could not be downloaded")
    shutil.unpack_archive(folder / f"horovod-{VERSION}.tar.gz", folder)
    return folder / f"horovod-{VERSION}"


def build(folder: Path, *, mpi: bool, gpu: str | None, log: Path) -> Path:
    """Download, patch and compile Horovod's source into a wheel in a folder, and return the wheel. Takes minutes.

    Args:
        folder: a folder of the cache. Its name is the version of the wheel.
        mpi: whether to build the MPI controller, too. The gloo controller is always built.
        gpu: as in ``edits_for``.
        log: the file that the output of pip and the compiler is appended to.

    Raises:
        BackendError: it could not be downloaded, or did not compile. The message has the first lines with an error.
    """
    # On the same file system as the cache, so that the wheel is moved in one step: nobody finds half of it.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder.parent) as temporary:
        source = fetch(Path(temporary), log)
        apply_edits(source, edits_for(gpu))
        options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", temporary]
        environment = _build_environment(folder.name.partition("+")[2], mpi, gpu, Path(temporary))
        run_logged(pip("wheel", "-v", *options, str(source)), log, "Horovod did not compile", environment)
        # pip names the wheel, after the label and the platform.
        [wheel] = Path(temporary).glob("*.whl")
        return wheel.replace(folder / wheel.name)


def _build_environment(label: str, mpi: bool, gpu: str | None, folder: Path) -> dict[str, str]:
    """Return the environment of the compilation, without variables of Horovod's that would change it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    environment |= {
        "PATH": search_path(),
        "HOROVOD_LOCAL_VERSION": label,
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        # CMake 4 refuses the minimum version that Horovod's gloo declares.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    # A compiler of torch's headers takes up to 2 GB. Too many at once would be killed.
    at_once = max(1, min(usable_cores(), psutil.virtual_memory().available // _BYTES_PER_COMPILER))
    environment.setdefault("MAKEFLAGS", f"-j{at_once}")
    return environment | _gpu_environment(gpu, folder) if gpu else environment


def _gpu_environment(gpu: str, folder: Path) -> dict[str, str]:
    """Return the additional variables of a build with GPU operations.

    Args:
        gpu: as in ``edits_for``.
        folder: a folder for links to torch's NCCL.
    """
    # Shared, since torch brings its NCCL as a shared library only.
    environment = {"HOROVOD_GPU_OPERATIONS": gpu.upper(), "HOROVOD_NCCL_LINK": "SHARED"}
    if cuda := find_cuda():
        environment["HOROVOD_CUDA_HOME"] = str(cuda[0])
        environment["PATH"] = os.pathsep.join([str(cuda[0] / "bin"), search_path()])
    nccl = Path(torch.__file__).parent.parent / "nvidia" / "nccl"  # of torch's package nvidia-nccl-cu…
    if (nccl / "include" / "nccl.h").is_file():
        home = folder / "nccl"
        (home / "lib").mkdir(parents=True)
        (home / "include").symlink_to(nccl / "include")
        (home / "lib" / "libnccl.so").symlink_to(nccl / "lib" / "libnccl.so.2")  # the name that linkers look for
        environment["HOROVOD_NCCL_HOME"] = str(home)
    return environment


def pip(*arguments: str) -> list[str]:
    """Return the command that runs this environment's pip."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def run_logged(command: Sequence[str], log: Path, failure: str, environment: dict[str, str] | None = None) -> None:
    """Run ``command``, and append its output to ``log``.

    Args:
        command: a program and its arguments.
        log: the file.
        failure: the beginning of the error message.
        environment: the complete environment; None for this process's.

    Raises:
        BackendError: it failed. The message has the relevant lines.
    """
    lines = []
    with log.open("a") as file, running(command, environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            lines.append(line.rstrip())
    if process.returncode != 0:
        shown = "\n".join(f"    {line[:300]}" for line in _relevant_lines(lines))
        raise BackendError(f"{failure}:\n{shown}\n  The complete output is in {log}")


def _relevant_lines(lines: list[str]) -> list[str]:
    """Return the lines from the first error on, or the last lines without an error."""
    error = re.compile(r"\berror\b\s*:|\bCMake Error\b|^ERROR:|\bfatal\b", re.IGNORECASE)
    first = next((number for number, line in enumerate(lines) if error.search(line)), len(lines) - _SHOWN_LINES)
    return lines[max(0, first) :][:_SHOWN_LINES]
