"""Does what docs/tutorial.md says with a wheel, in an empty environment.

    python .ci/try_wheel.py dist/unitrain-0.2.0-py3-none-any.whl --python python3.10 --resolution lowest-direct

All commands of the page are run, Horovod's build included, and what they print is compared with the page, but for
numbers. Needs the packages of UniTrain's test extra.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("support", "docs")]

from page_blocks import blocks  # noqa: E402

EXTRAS = ("recipes", "mpi")  # as on the page


def environment_of(wheel: Path, python: str, resolution: str, folder: Path) -> Path:
    """Make a virtual environment with a wheel, and the versions of what it needs that a resolution of uv chooses."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    (unitrain,) = distributions(path=[str(wheel)])
    needed = [Requirement(line) for line in unitrain.requires or ()]
    here = [r for r in needed if not r.marker or any(r.marker.evaluate({"extra": extra}) for extra in EXTRAS)]
    # Each by name: of a wheel's needs, uv takes the highest versions whatever the resolution.
    named = [f"{r.name}{r.specifier}" for r in here]
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(folder)]
    subprocess.run([*install, "--only-binary", ":all:", "--resolution", resolution, *named, str(wheel)], check=True)
    return folder


def do_tutorial(environment: Path, folder: Path) -> None:
    """Do what the page says in a folder, with the programs of an environment."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environ["PATH"] = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # As root, and on fewer cores than there are processes.
    environ |= {f"OMPI_{name}": "1" for name in ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM")}
    environ["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    printed = ""
    for block in blocks(ROOT / "docs" / "tutorial.md"):
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.language == "bash" and "several GB" not in block.not_run and "minutes" not in block.not_run:
            print(f"\n{block.place}:", *block.text.splitlines(), sep="\n  ", flush=True)
            done = subprocess.run(
                ["bash", "-euc", block.text], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=True
            )
            printed = done.stdout
            print(printed, flush=True)
        elif block.language == "text":
            missing = _lines(block.text) - _lines(printed)
            if missing:
                sys.exit(f"{block.place}: {sorted(missing)} was not printed, but:\n{printed}")


def _lines(text: str) -> set[str]:
    """Return lines without numbers, and without the rank that a launcher puts in front."""
    return {re.sub(r"\d+(\.\d+)?", "0", re.sub(r"^\[.*?\]<stdout>:", "", line)) for line in text.splitlines()}


def main() -> None:
    """Make the environment, and do the tutorial."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", default=sys.executable, help="makes the environment")
    parser.add_argument("--resolution", default="highest", choices=("lowest-direct", "highest"), help="of uv")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "tutorial")
        folder.mkdir()
        environment = environment_of(arguments.wheel, arguments.python, arguments.resolution, Path(name, "environment"))
        subprocess.run([environment / "bin" / "unitrain", "install-horovod"], check=True, cwd=folder)
        do_tutorial(environment, folder)


if __name__ == "__main__":
    main()
