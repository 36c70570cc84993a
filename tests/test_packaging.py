from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_wheel_holds_every_module(tmp_path: Path) -> None:
    # Of a copy, since building leaves folders behind in the tree.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("unitrain", "backends", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (wheel,) = tmp_path.glob("unitrain-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    installed = {path.relative_to(ROOT).as_posix() for path in (ROOT / "unitrain").rglob("*.py")}
    for folder in ("backends", "recipes"):
        installed |= {f"unitrain/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    assert held == {*installed, "unitrain/py.typed"}
