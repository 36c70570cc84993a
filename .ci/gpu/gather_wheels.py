"""Gathers what the scripts install on a machine with a GPU and without a network, into .ci/gpu/wheels (about 40 MB).

    python .ci/gpu/gather_wheels.py --python 3.12 --torch 2.11.0

The versions are those of Python and torch on that machine. torch itself is not gathered: a wheel of that name and
version that is empty stands for it while pip chooses versions that fit it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import requires
from pathlib import Path

from machine import HERE, HOROVOD, ROOT, WHEELS

# pip takes wheels of exactly the platforms that it is told.
_PLATFORMS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in (5, 12, 17, 24, 27, 28, 31, 34, 35)))


def stand_in(name: str, version: str, folder: Path) -> None:
    """Write a wheel that holds nothing, and requires nothing."""
    label = f"{name}-{version}"
    with zipfile.ZipFile(folder / f"{label}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{label}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{label}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{label}.dist-info/RECORD", "")


def gather(python: str, torch: str) -> None:
    """Download the wheels for a machine's Python and torch, and Horovod's source, which is built there."""
    others = [line for line in requires("unitrain") or () if "extra ==" not in line and not line.startswith("torch>")]
    platforms = [f"--platform={name}_x86_64" for name in _PLATFORMS]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(WHEELS)]
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    with tempfile.TemporaryDirectory() as folder:
        stand_in("torch", f"{torch}+there", Path(folder))
        wanted = [f"torch=={torch}+there", "--requirement", str(HERE / "requirements.txt"), *others]
        subprocess.run([*pip, "--find-links", folder, *target, *wanted], check=True)
    for path in WHEELS.glob("torch-*"):
        path.unlink()
    source = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", HOROVOD]
    subprocess.run([*pip, *source], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="version of Python there, such as 3.12")
    parser.add_argument("--torch", required=True, help="version of torch there, such as 2.11.0")
    arguments = parser.parse_args()
    for old in WHEELS.glob("*"):
        old.unlink()
    gather(arguments.python, arguments.torch)
    megabytes = sum(path.stat().st_size for path in WHEELS.iterdir()) / 1e6
    print(f"{len(list(WHEELS.iterdir()))} files, {megabytes:.0f} MB in {WHEELS.relative_to(ROOT)}")
