"""The simulated device: builds it once, and makes it the device ``sim`` of this process, with the module ``torch.sim``.

A process gets it by ``load``, or when it imports torch, if PYTHONPATH says so (``autoload``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

from unitrain.process import cache_folder

FOLDER = Path(__file__).parent
_SOURCES = sorted((FOLDER / "src").iterdir())
_NAME = "simulated_device_module"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Werror", "-Wno-attributes")


def compiler() -> str | None:
    """Return the C++ compiler, or None without one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build() -> Path:
    """Return the device's library for this torch, compiled now (half a minute) unless it is in the cache."""
    library = _cached() / f"{_NAME}.so"
    if library.is_file():
        return library
    found = compiler()
    assert found is not None, "there is no C++ compiler"
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.parent / "lock"):
        if not library.is_file():
            made = library.with_suffix(".new")
            done = subprocess.run([found, *_arguments(), "-o", str(made)], capture_output=True, text=True)
            assert done.returncode == 0, f"the simulated device did not compile:\n{done.stderr}"
            made.replace(library)
    return library


def _cached() -> Path:
    """Return the folder for what is built of these sources for this torch, beside that of Horovod's wheels."""
    depends_on = [torch.__version__, str(sys.implementation.cache_tag), sysconfig.get_platform(), *platform.libc_ver()]
    digest = hashlib.sha256("\n".join([*depends_on, *_FLAGS]).encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return cache_folder() / "simulated_device" / digest.hexdigest()[:12]


def _arguments() -> list[str]:
    root = Path(torch.__file__).parent
    headers = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    return [
        *_FLAGS, f"-DTORCH_EXTENSION_NAME={_NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{folder}" for folder in headers), str(FOLDER / "src" / "module.cpp"),
        f"-L{root / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


def is_loaded() -> bool:
    """Return whether this process has the device."""
    return _NAME in sys.modules


def load(devices: int = 2, progress: str = "late", seed: int = 0) -> None:
    """Make the device ``sim`` of this process, for the rest of its life.

    Args:
        devices: how many there are.
        progress: when streams do what they have queued: "late", when a host thread waits for it; "at-once", without
            waiting; "random", in between.
        seed: of "random".
    """
    spec = importlib.util.spec_from_file_location(_NAME, build())
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    torch.utils.rename_privateuse1_backend("sim")
    spec.loader.exec_module(native)
    native.start(devices, progress, seed)
    sys.modules[_NAME] = native
    torch._register_device_module("sim", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    import simulated_ccl

    simulated_ccl.register()


def _module() -> ModuleType:
    import simulated_module

    return simulated_module


def autoload() -> None:
    """Load the device as torch is imported: torch's entry point ``torch.backends`` (``autoload/``)."""
    settings = dict(pair.split("=") for pair in os.environ.get("SIMULATED_DEVICE", "").split(",") if pair)
    load(int(settings.get("devices", 2)), settings.get("progress", "late"), int(settings.get("seed", 0)))
