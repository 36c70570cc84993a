"""A checkpoint that all ranks write: complete or not there, whichever rank fails, and damage in any file is noticed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from saved_run import folder_of, steps_in, verified
from torch import nn
from torch.optim import Adam

import unitrain
from unitrain import CheckpointError
from unitrain.checkpoint.sharded import saving
from unitrain.checkpoint.sharded.saving import Shards, write_all
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Draft


def made() -> tuple[nn.Module, Adam]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    return model, Adam(model.parameters(), lr=0.1)


def save(folder: str, steps: int, failing: tuple[int, str] | None = None, background: bool = True) -> str:
    """Save after each step; at the last one, a rank fails as it writes. Return the error."""
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=20) as strategy:
        model, optimizer = strategy.prepare(*made())
        checkpoint = strategy.checkpoint(folder, background=background, model=model, optimizer=optimizer)
        checkpoint.resume()
        try:
            for step in range(1, steps + 1):
                strategy.step(model(torch.ones(2, 5) * step).square().mean(), optimizer)
                checkpoint.wait()
                if failing is not None and step == steps and strategy.rank == failing[0]:
                    vars(saving)["write_shards"] = fail_by(failing[1])
                checkpoint.save()
            if failing is None:
                checkpoint.wait()
            else:
                checkpoint.resume()  # waits, too
        except CheckpointError as error:
            return str(error)
    return ""


def fail_by(how: str) -> Any:
    def fail(draft: Draft, rank: int, shards: Shards) -> Any:
        draft.store.put(f"{draft.name}/__{rank}_0.distcp", b"half of it")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the disk is on fire")

    return fail


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that one process resumes."""
    with unitrain.init(backend="single", device="cpu") as strategy:
        model, optimizer = strategy.prepare(*made())
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        assert checkpoint.resume()
        return {"step": torch.tensor(strategy.global_step), **model.state_dict()}


@pytest.mark.parametrize(
    ("how", "rank"), [("kill", 1), ("raise", 0), pytest.param("raise", 1, marks=pytest.mark.all("another rank"))]
)
def test_a_rank_that_fails_as_it_writes_leaves_the_checkpoint_before(tmp_path: Path, how: str, rank: int) -> None:
    run_ranks(save, str(tmp_path / "whole"), 1)
    folder = tmp_path / "failing"
    if how == "kill":
        with pytest.raises(Exception, match=rf"rank {rank} .*(SIGKILL|signal 9)"):
            run_ranks(save, str(folder), 2, (rank, how))
    else:
        for said in run_ranks(save, str(folder), 2, (rank, how)):
            assert "the disk is on fire" in said
            assert f"rank {rank} could not write its shards" in said or rank == 0
    found, expected = weights(folder), weights(tmp_path / "whole")
    assert found["step"] == 1
    assert all(map(torch.equal, found.values(), expected.values()))


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.all("not in the background")), True])
def test_every_rank_writes_its_own(tmp_path: Path, background: bool) -> None:
    run_ranks(save, str(tmp_path), 1, None, background, nprocs=3)
    folder = folder_of(tmp_path, *steps_in(tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "_run.pt", "manifest.json",
    ]  # fmt: skip
    verified(folder)


def test_a_rank_that_does_not_write_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1 has not written its shards within timeout_s \(0\.1 s\)"):
        write_all(Draft(Disk(tmp_path), "draft"), Shards({}, {}, {}, {}), 2, 0.1)


def save_in_memory(settings: dict[str, Any]) -> bool:
    """Save where rank 0 alone can write, and resume. Return whether the step after that is the same as before."""
    with unitrain.init(device="cpu", timeout_s=30, **settings) as strategy:
        model, optimizer = strategy.prepare(*made())
        strategy.step(model(torch.ones(2, 5)).square().mean(), optimizer)
        checkpoint = strategy.checkpoint(f"memory://run-{settings['backend']}", model=model, optimizer=optimizer)
        checkpoint.save()
        strategy.step(model(torch.ones(2, 5)).square().mean(), optimizer)
        before = {key: value.clone() for key, value in strategy.export(model).state_dict().items()}
        assert checkpoint.resume()
        strategy.step(model(torch.ones(2, 5)).square().mean(), optimizer)
        return all(map(torch.equal, before.values(), strategy.export(model).state_dict().values()))


@pytest.mark.parametrize("settings", [{"backend": "fsdp"}, {"backend": "ddp", "shard_optimizer": True}], ids=str)
def test_rank_0_writes_all_to_a_store_that_it_alone_sees(settings: dict[str, Any]) -> None:
    assert run_ranks(save_in_memory, settings) == [True, True]
