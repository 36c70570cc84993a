"""The machine that the scripts run on: bare, with torch, one NVIDIA GPU and no network; or any, for a dry run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WHEELS = HERE / "wheels"
# benchmarks/ has models that the probes train; the others have cases that run on the GPU, too.
IMPORTED = os.pathsep.join(str(ROOT / folder) for folder in ("benchmarks", "tests/compat", "tests/features"))
HOROVOD = "horovod==0.28.1"
HOROVOD_BUILD = ("-m", "unitrain.commands.cli", "install-horovod", "--gpu", "nccl", "--without-mpi")
# Of an interpreter that has what the tests need. torch's plug-ins are found by PYTHONPATH.
_SIMULATED = """
import json, sys
sys.path[:0] = sys.argv[1:]
import on_device
print(json.dumps(on_device.environment()))
"""


@dataclass(frozen=True)
class Machine:
    """The interpreter, the variables and the device of the steps."""

    python: str
    environment: Mapping[str, str]
    device: str
    dry_run: bool

    def pytest(self, *arguments: str) -> Sequence[str]:
        """Return a command that runs tests. What warns is shown, and does not fail."""
        return [self.python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *arguments]


def set_up(dry_run: bool) -> Machine:
    """Install UniTrain, and what else is missing, beside what the machine has. Nothing is installed for a dry run."""
    common = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": IMPORTED,
        # Nothing leaves the machine, whose name may not resolve.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG": "WARN",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(WHEELS),
    }
    if dry_run:
        paths = [str(ROOT / "tests" / folder) for folder in ("simulated_device", "support", "support/forking")]
        done = subprocess.run([sys.executable, "-c", _SIMULATED, *paths], stdout=subprocess.PIPE, check=True)
        simulated = json.loads(done.stdout)
        simulated["PYTHONPATH"] += f"{os.pathsep}{IMPORTED}"
        return Machine(sys.executable, {**os.environ, **common, **simulated}, "sim", True)
    if shutil.which("nvidia-smi") is None:
        sys.exit("There is no nvidia-smi, thus no NVIDIA GPU: --dry-run runs the steps without one.")
    folder = Path(tempfile.gettempdir(), "unitrain-on-gpu")
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        _install(folder, python)
        (folder / "done").touch()
    programs = [str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    # Horovod's kernels are compiled for this card only.
    capability = "nvidia-smi --query-gpu=compute_cap --format=csv,noheader --id=0"
    version = subprocess.run(capability.split(), stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    common |= {"PATH": os.pathsep.join(programs), "HOROVOD_BUILD_CUDA_CC_LIST": version.replace(".", "")}
    return Machine(str(python), {**os.environ, **common}, "cuda:0", False)


def _install(folder: Path, python: Path) -> None:
    """Make an environment that sees the packages of this interpreter, which may itself be of an environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder)], check=True)
    (library,) = folder.glob("lib/python*/site-packages")
    # With the .pth files there: setuptools' puts its distutils where horovodrun looks for Python's.
    outer = [f"import site; site.addsitedir({path!r})\n" for path in sys.path if path.endswith("-packages")]
    (library / "outer.pth").write_text("".join(outer))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
    offline = [*pip, "--disable-pip-version-check", "--no-build-isolation", "--find-links", str(WHEELS)]
    # What builds UniTrain comes first.
    subprocess.run([*offline, "--requirement", str(HERE / "requirements.txt")], check=True)
    subprocess.run([*offline, "--editable", str(ROOT)], check=True)
