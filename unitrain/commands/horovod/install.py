"""``unitrain install-horovod``: installs a Horovod for the installed torch, from the cache or built now.

A wheel is cached for every combination of versions, with a version that identifies the combination
(``0.28.1+unitrain…``), so that the installed version shows whether it is the right one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import sysconfig
from importlib.util import find_spec

import torch
from filelock import FileLock
from rich.console import Console

from unitrain.commands.horovod.build import VERSION, build, check_tools, edits_for, pip, run_logged
from unitrain.commands.horovod.check import HorovodBuild, check_allreduce, find_horovod
from unitrain.errors import BackendError
from unitrain.launch.local.toolchain import Mpi, find_cuda, find_mpi, installed_version
from unitrain.process import cache_folder

# UniTrain itself requires what else Horovod does: cloudpickle, packaging, psutil and pyyaml.
_REQUIREMENTS = ("cffi", "setuptools", "wheel")


def install_horovod(*, gpu: str = "none", without_mpi: bool = False, force: bool = False) -> int:
    """Build Horovod for the installed torch, install it and test it, unless this was done before.

    Args:
        gpu: nccl to build GPU operations, too, auto to do so if torch finds a GPU, or none.
        without_mpi: build the gloo controller only.
        force: build, install and test again.

    Returns:
        The exit code, 0.

    Raises:
        BackendError: pip, the cache or a tool is missing, or the build or a test has failed.
    """
    console = Console(soft_wrap=True, highlight=False)
    if find_spec("pip") is None:
        raise BackendError(
            "This environment has no pip, which installs Horovod: python -m ensurepip (or: uv pip install pip)"
        )
    nccl = "nccl" if gpu == "nccl" or (gpu == "auto" and torch.cuda.is_available()) else None
    mpi = None if without_mpi else find_mpi()
    wanted = HorovodBuild(VERSION, ("mpi", "gloo") if mpi else ("gloo",), nccl is not None)
    labelled = wheel_version(mpi, nccl)
    folder = cache_folder() / "horovod" / labelled
    folder.mkdir(parents=True, exist_ok=True)
    # A wheel in the cache may have been tested in another environment, where its MPI worked.
    tested = folder / f"proved-{_digest(sys.prefix)}"
    # Other runs in this environment wait: pip must not run twice at a time.
    with FileLock(folder.parent / f"{_digest(sys.prefix)}.lock"):
        if not force and tested.is_file() and installed_version("horovod") == labelled:
            console.print(f"Horovod {VERSION} is installed and tested ({wanted}). Nothing to do.")
            return 0
        # Until the tests below have passed again.
        tested.unlink(missing_ok=True)
        if mpi is None:
            console.print(
                "[yellow]Horovod is built with the gloo controller only, for 'horovodrun --gloo', and not for mpirun "
                "(pip install 'unitrain\\[mpi]' adds one).[/]"
            )
        log = folder / "install.log"
        wheel = None if force else next(folder.glob("*.whl"), None)
        if wheel is None:
            check_tools(mpi, nccl)
        run_logged(pip("install", *_REQUIREMENTS), log, "The requirements of Horovod could not be installed")
        if wheel is None:
            console.print(f"Building Horovod {VERSION} for torch {torch.__version__} ({wanted}): see {log}")
            wheel = build(folder, mpi=mpi is not None, gpu=nccl, log=log)
        console.print(f"Installing {wheel}.")
        # pip would keep an installed wheel of the same version, though it may be another file.
        options = ["--no-deps", "--force-reinstall", "--no-index"]
        run_logged(pip("install", *options, str(wheel)), log, f"{wheel} could not be installed")
        # Horovod builds without a feature, and without an error, if its library is not found.
        if (features := find_horovod()) != wanted:
            raise BackendError(
                f"{wheel} was installed, but lacks features that it was built with ({wanted}): {features}"
            )
        for controller in wanted.controllers:
            check_allreduce(controller)
            console.print(f"Tested: an allreduce over two processes with the {controller} controller.")
        # Last: what was installed and failed its tests is tested again by the next run.
        tested.touch()
        console.print(f"[green]Horovod {VERSION} is ready[/] ({wanted}).")
    return 0


def wheel_version(mpi: Mpi | None, gpu: str | None) -> str:
    """Return the version of a wheel, with a label for all that it depends on: where that is the same, it is shared.

    Args:
        mpi: the MPI to build with; None for a build without.
        gpu: as in ``build.edits_for``.
    """
    _, cuda = find_cuda() or (None, None)
    # The same for all environments that contain it.
    inside = mpi is not None and mpi.mpirun.is_relative_to(sys.prefix)
    depends_on = {
        "horovod": VERSION,
        "torch": f"{torch.__version__} CUDA {torch.version.cuda}",
        "python": sys.implementation.cache_tag,
        "platform": f"{sysconfig.get_platform()} {' '.join(platform.libc_ver())}",
        "mpi": mpi and f"{mpi} in {'the environment' if inside else mpi.mpirun.parent}",
        "gpu": [gpu, cuda] if gpu else [],
        "edits": [edit._asdict() for edit in edits_for(gpu)],
    }
    return f"{VERSION}+unitrain{_digest(json.dumps(depends_on, sort_keys=True))}"


def _digest(value: str) -> str:
    """Return the first 12 hexadecimal digits of a string's SHA-256."""
    return hashlib.sha256(value.encode()).hexdigest()[:12]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "--gpu",
        choices=["auto", "nccl", "none"],
        default="auto",
        help="nccl also builds GPU operations; auto does so if torch finds a GPU (default: %(default)s)",
    )
    parser.add_argument("--without-mpi", action="store_true", help="build without MPI even if it is installed")
    parser.add_argument("--force", action="store_true", help="build, install and test again even if it is installed")
    parser.set_defaults(run=install_horovod)
