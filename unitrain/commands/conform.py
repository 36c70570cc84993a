"""``unitrain conform``: does a backend do what every backend owes its users? The contract, run by pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from unitrain.backend import load_backend
from unitrain.errors import UsageError

# pytest's exit codes: all passed, some failed, interrupted; others say that it could not run.
_RAN = (0, 1, 2)


def conform(backend: str, *, processes: str, arguments: Sequence[str] = ()) -> int:
    """Run the contract of a backend, and return the exit status: 0 where every duty is done.

    Args:
        backend: its name.
        processes: numbers of processes, with commas.
        arguments: further ones for pytest.

    Raises:
        ConfigError: no backend of that name is installed.
        BackendError: it can't be imported.
        UsageError: pytest is not installed, or could not run.
    """
    load_backend(backend)
    if find_spec("pytest") is None:
        raise UsageError(
            "the contract is run by pytest, which is not installed: pip install 'unitrain[testing]' adds it."
        )
    # What is found in the current folder is the author's: pytest's settings and conftest.py there are for other tests.
    own_settings = [
        "-c",
        os.devnull,
        "--rootdir",
        ".",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "unitrain.testing.plugin",
    ]
    options = ["--backend", backend, "--processes", processes, "--quiet", "--no-header"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    command = [sys.executable, "-m", "pytest", *own_settings, "--pyargs", "unitrain.testing", *options, *arguments]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code not in _RAN:
        raise UsageError(f"pytest could not run the contract (its exit code is {code}): it says above why.")
    return code
