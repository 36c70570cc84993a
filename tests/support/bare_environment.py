"""A virtual environment with this one's packages but none of its programs, to test messages about missing ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BareEnvironment:
    """Runs the unitrain command with chosen programs only."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> BareEnvironment:
        venv.create(folder / "venv", symlinks=True)
        library = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
        # addsitedir, unlike a plain line, reads the .pth files there too: an editable install is one.
        line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (folder / "venv" / library / "shared.pth").write_text(line)
        (folder / "programs").mkdir()
        return cls(folder)

    def allow(self, *names: str) -> None:
        """Let it find some of this machine's programs."""
        for name in names:
            found = shutil.which(name)
            assert found, f"{name} is not installed here"
            (self.folder / "programs" / name).symlink_to(found)

    def add(self, name: str, script: str) -> Path:
        """Let it find a program that is this shell script."""
        path = self.folder / "programs" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start_python("-m", "unitrain.commands.cli", *arguments)

    def start_python(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "HOROVOD"))}
        environment |= {"PATH": str(self.folder / "programs"), "UNITRAIN_CACHE": str(self.folder / "cache")}
        environment.pop("CXX", None)
        command = [str(self.folder / "venv" / "bin" / "python"), *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments) as process:
            out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)
