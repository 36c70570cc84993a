"""What ``programs/trains.py`` has trained, however it was started."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch
from places import TESTS

TRAINS = TESTS / "programs" / "trains.py"
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Return the weights that a single process trains."""
    folder = tmp_path_factory.mktemp("expected")
    subprocess.run(forked_python.command(str(TRAINS), str(folder)), check=True, timeout=120)
    weights: Weights = torch.load(folder / "trained.pt")["model"]
    return weights


def assert_trained(folder: Path, expected: Weights, *, world_size: int) -> dict[str, Any]:
    """Assert that a job has trained these weights with so many ranks, and return what it has saved besides."""
    saved: dict[str, Any] = torch.load(folder / "trained.pt")
    assert saved.pop("world_size") == world_size
    weights: Weights = saved.pop("model")
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-9)
    return saved
