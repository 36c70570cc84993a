"""``unitrain conform``: runs the tests that every backend must pass, with pytest."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from unitrain.communication.backend import load_backend
from unitrain.errors import UsageError

# Exit codes of pytest: all passed, some failed, interrupted. With others it could not run the tests.
_RAN = (0, 1, 2)
# pytest's settings and conftest.py in the current folder are for other tests.
_OWN_SETTINGS = f"-c {os.devnull} --rootdir . --noconftest -p no:cacheprovider -p unitrain.testing.plugin".split()


def conform(backend: str, *, processes: str, arguments: Sequence[str] = ()) -> int:
    """Run the contract tests with a backend, and return pytest's exit code: 0 if all passed.

    Args:
        backend: the name of the backend.
        processes: numbers of processes, comma-separated. Each is tested.
        arguments: further arguments for pytest.

    Raises:
        UsageError: pytest is not installed, or could not run the tests.
        BackendError: there is no such backend.
    """
    # Raises now if there is no such backend: in pytest, it would be an error of collection.
    load_backend(backend)
    if find_spec("pytest") is None:
        raise UsageError("conform needs pytest, which is not installed: pip install 'unitrain[testing]'.")
    options = ["--backend", backend, "--processes", processes, "--quiet", "--no-header"]
    # PYTEST_ADDOPTS may name plug-ins of the user's own tests.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    command = [sys.executable, "-m", "pytest", *_OWN_SETTINGS, "--pyargs", "unitrain.testing", *options, *arguments]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code not in _RAN:
        raise UsageError(f"pytest could not run the contract tests (exit code {code}); its output above says why.")
    return code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("--backend", metavar="NAME", required=True, help="name of the backend")
    parser.add_argument(
        "--processes", metavar="N", default="1,2,3", help="numbers of processes, comma-separated (default: %(default)s)"
    )
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments for pytest, after --")
    parser.set_defaults(run=conform)
