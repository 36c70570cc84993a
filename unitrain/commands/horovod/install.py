"""``unitrain install-horovod``: installs a Horovod for the installed torch, from the cache or built now.

A wheel is cached for every combination of versions, with a version that identifies the combination
(``0.28.1+unitrain…``), so that the installed version shows whether it is the right one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from packaging.version import InvalidVersion, Version
from rich.console import Console

from unitrain.commands.horovod.build import (
    GPU_VARIABLES,
    KNOWN_SDISTS,
    Edit,
    apply_edits,
    build,
    check_tools,
    edits_for,
    fetch,
    pip,
    run_logged,
)
from unitrain.commands.horovod.check import check_allreduce, find_horovod
from unitrain.commands.toolchain import Mpi, find_cuda, find_mpi, installed_version
from unitrain.errors import BackendError, ConfigError

# UniTrain itself requires the others: cloudpickle, packaging, psutil and pyyaml.
_RUNTIME_REQUIREMENTS = ("cffi",)
_BUILD_REQUIREMENTS = (*_RUNTIME_REQUIREMENTS, "setuptools", "wheel")


@dataclass(frozen=True)
class Combination:
    """Everything that a wheel depends on. Environments with the same combination share the wheel."""

    horovod: str
    torch: str
    python: str
    platform: str
    mpi: str | None
    gpu: tuple[str, ...]
    edits: tuple[Edit, ...]

    @property
    def label(self) -> str:
        """Local version label, unique to this combination."""
        return f"unitrain{_digest(json.dumps(asdict(self), sort_keys=True))}"

    @property
    def version(self) -> str:
        """Version of the wheel."""
        return f"{self.horovod}+{self.label}"

    @property
    def controllers(self) -> tuple[str, ...]:
        """The controllers of this build: gloo, and mpi if built with it."""
        return ("mpi", "gloo") if self.mpi else ("gloo",)

    def __str__(self) -> str:
        operations = "CPU and NCCL" if self.gpu else "CPU"
        return f"controllers: {', '.join(self.controllers)}; operations: {operations}"


def install_horovod(version: str, *, gpu: str = "none", without_mpi: bool = False, force: bool = False) -> int:
    """Build Horovod for the installed torch, install it and test it, unless this was done before.

    ``gpu`` is nccl to build GPU operations, too, auto to do so if torch finds a GPU, or none.

    Raises:
        ConfigError: ``version`` is not a valid version.
        BackendError: a tool is missing, or a step failed; the message says what to do.
    """
    console = Console(soft_wrap=True, highlight=False)
    if find_spec("pip") is None:
        raise BackendError(
            "This environment has no pip, which is needed to install Horovod: python -m ensurepip (or: uv pip install "
            "pip)"
        )
    nccl = "nccl" if gpu == "nccl" or (gpu == "auto" and torch.cuda.is_available()) else None
    mpi = None if without_mpi else find_mpi()
    combination = combine(version, mpi, nccl)
    folder = _writable(cache_folder() / "horovod" / combination.version)
    tested = folder / f"proved-{_digest(sys.prefix)}"
    with _alone(folder.parent, console):
        if not force and tested.is_file() and installed_version("horovod") == combination.version:
            console.print(f"Horovod {version} is installed and tested ({combination}). Nothing to do.")
            return 0
        tested.unlink(missing_ok=True)
        if mpi is None:
            _explain_missing_mpi(console, without_mpi)
        log = folder / f"install-{os.getpid()}.log"
        wheel = next(folder.glob("*.whl"), None)
        if wheel is None or force:
            check_tools(mpi, nccl)
            _add_missing(console, _BUILD_REQUIREMENTS, log)
            wheel = _build(console, combination, nccl, folder, log)
        else:
            console.print(f"Using a cached wheel: {wheel}")
        _add_missing(console, _RUNTIME_REQUIREMENTS, log)
        _install(console, wheel, combination, log)
        for controller in combination.controllers:
            check_allreduce(controller)
            console.print(f"Tested: an allreduce over two processes with the {controller} controller.")
        tested.touch()
        log.replace(folder / "install.log")
        console.print(f"[green]Horovod {version} is ready[/] ({combination}).")
    return 0


def combine(version: str, mpi: Mpi | None, gpu: str | None) -> Combination:
    """Return the combination of Horovod ``version`` in this environment."""
    try:
        Version(version)
    except InvalidVersion as error:
        known = ", ".join(KNOWN_SDISTS)
        raise ConfigError(
            f"--version {version!r} is not a valid version; tested versions of Horovod: {known}"
        ) from error
    return Combination(
        horovod=version,
        torch=f"{torch.__version__} CUDA {torch.version.cuda}",
        python=str(sys.implementation.cache_tag),
        platform=f"{sysconfig.get_platform()} {' '.join(platform.libc_ver())}",
        mpi=f"{mpi} in {_place(mpi.mpirun)}" if mpi else None,
        gpu=(gpu, *_gpu_parts()) if gpu else (),
        edits=edits_for(gpu),
    )


def cache_folder() -> Path:
    """Return UniTrain's cache folder: UNITRAIN_CACHE, else ``unitrain`` in the user's cache folder."""
    if chosen := os.environ.get("UNITRAIN_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "unitrain"


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise BackendError(
            f"The cache folder {folder} is not writable ({error.strerror}); set UNITRAIN_CACHE to one that is."
        ) from error


@contextmanager
def _alone(folder: Path, console: Console) -> Iterator[None]:
    """Lock out other runs of this command in this environment, since pip must not run twice at a time."""
    lock = FileLock(folder / f"{_digest(sys.prefix)}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print("Another install-horovod is running in this environment; waiting for it to end.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:12]


def _place(program: Path) -> str:
    """Return the folder of ``program``, or the same string for all environments that contain it."""
    return "the environment" if program.is_relative_to(sys.prefix) else str(program.parent)


def _gpu_parts() -> tuple[str, ...]:
    cuda = find_cuda()
    settings = [f"{name}={os.environ[name]}" for name in GPU_VARIABLES if os.environ.get(name)]
    return (f"CUDA {cuda.version}" if cuda else "no CUDA", *settings)


def _explain_missing_mpi(console: Console, chosen: bool) -> None:
    reason = "as requested" if chosen else "since no mpirun was found"
    advice = "" if chosen else " For both: pip install 'unitrain\\[mpi]', and run this again."
    consequence = "it works with 'horovodrun --gloo', but not with mpirun"
    console.print(f"[yellow]Horovod is built with the gloo controller only, {reason}: {consequence}.[/]{advice}")


def _add_missing(console: Console, names: tuple[str, ...], log: Path) -> None:
    missing = [name for name in names if installed_version(name) is None]
    if missing:
        console.print(f"Installing the requirements of Horovod: {', '.join(missing)}")
        run_logged(pip("install", *missing), log, f"{', '.join(missing)} could not be installed")


def _build(console: Console, combination: Combination, gpu: str | None, folder: Path, log: Path) -> Path:
    """Build the wheel and move it into the cache atomically."""
    console.print(f"Building Horovod {combination.horovod} for torch {torch.__version__} ({combination}).")
    console.print(f"This takes some minutes; the output is written to {log}")
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder.parent) as temporary:
        source = fetch(combination.horovod, Path(temporary), log)
        apply_edits(source, combination.edits)
        wheel = build(source, combination.label, mpi=combination.mpi is not None, gpu=gpu, log=log)
        return wheel.replace(folder / wheel.name)


def _install(console: Console, wheel: Path, combination: Combination, log: Path) -> None:
    """Install the wheel, and check that it can be imported and has the expected features."""
    before = installed_version("horovod")
    if before not in (None, combination.version):
        console.print(f"Replacing Horovod {before}.")
    options = ["--no-deps", "--force-reinstall", "--no-index"]
    run_logged(pip("install", *options, str(wheel)), log, f"{wheel} could not be installed")
    found = find_horovod()
    if found is None or (found.controllers, found.nccl) != (combination.controllers, bool(combination.gpu)):
        raise BackendError(f"{wheel} was installed, but lacks features that it was built with ({combination}): {found}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("--version", default="0.28.1", help="version of Horovod (default: %(default)s)")
    parser.add_argument(
        "--gpu",
        choices=["auto", "nccl", "none"],
        default="auto",
        help="nccl also builds GPU operations; auto does so if torch finds a GPU (default: %(default)s)",
    )
    parser.add_argument("--without-mpi", action="store_true", help="build without MPI even if it is installed")
    parser.add_argument("--force", action="store_true", help="build, install and test again even if it is installed")
    parser.set_defaults(run=install_horovod)
