"""Emergency checkpoints that take longer than a launcher leaves are written to memory, and moved by the next start."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from harness import MPIRUN_DDP, TORCHRUN, World, worlds
from lives import STEPS, Killer, assert_undisturbed, begun_again, restarting, train, undisturbed
from s3_server import S3Server

from unitrain.checkpoint.emergency.spool import MEMORY

__all__ = ["undisturbed"]  # the fixture
pytestmark = [pytest.mark.launcher, pytest.mark.soak, pytest.mark.timeout(600)]
PLAN = (3, 3, 2)
SPOOLED = f"in {MEMORY}/unitrain-"


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails if a checkpoint is left in memory."""
    before = set(MEMORY.glob("unitrain-*/*"))
    yield
    assert set(MEMORY.glob("unitrain-*/*")) == before


@worlds(TORCHRUN)
def test_at_a_url(world: World, server: S3Server, tmp_path: Path, undisturbed: Path, nothing_left: None) -> None:
    killer = Killer(tmp_path, PLAN, random.Random(1), at_start=0)
    environ = {**server.environ, "TESTS_URL": "s3://bucket/run"}
    output = train(restarting(world, tmp_path, PLAN), tmp_path, environ, killer.run)
    assert output.count(SPOOLED) == 2, output
    assert output.count("unitrain: moved the emergency checkpoint of step ") == 2, output
    assert all(steps <= 1 for steps in begun_again(tmp_path)), output
    store = fsspec.filesystem("s3", endpoint_url=server.url, key="key", secret="secret")
    store.get(f"bucket/run/step-{STEPS:010d}", str(tmp_path / "checkpoints" / f"step-{STEPS:010d}"), recursive=True)
    assert_undisturbed(tmp_path, undisturbed)


@pytest.mark.alone  # so much has to be written in 0.9 seconds
@worlds(MPIRUN_DDP)
def test_a_large_one_under_mpirun(world: World, tmp_path: Path, nothing_left: None) -> None:
    killer = Killer(tmp_path, PLAN, random.Random(2), at_start=0)
    environ = {"UNITRAIN_BACKEND": world.backend, "TESTS_REST": str(13 * 10**6)}  # 104 MB
    output = train(restarting(world, tmp_path, PLAN), tmp_path, environ, killer.run)
    assert output.count(SPOOLED) == 2, output
    assert output.count("unitrain: moved the emergency checkpoint of step ") == 2, output
    assert all(steps <= 1 for steps in begun_again(tmp_path)), output
