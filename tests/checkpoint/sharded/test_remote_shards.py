"""Shards in an object store: each rank writes and reads its own, on a real S3 server."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import Mock, patch

import fsspec
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import Adam

import unitrain
from unitrain import CheckpointError
from unitrain.checkpoint.sharded import saving
from unitrain.checkpoint.store.objects import Objects

pytestmark = pytest.mark.usefixtures("server")
WIDTH = 40


def objects(url: str) -> dict[str, bytes]:
    store, root = fsspec.url_to_fs(url)
    store.invalidate_cache()
    return {path.removeprefix(root + "/"): bytes(store.cat_file(path)) for path in store.find(root)}


def put(url: str, data: bytes) -> None:
    store, path = fsspec.url_to_fs(url)
    store.pipe_file(path, data)


def made() -> tuple[nn.Module, Adam]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
    return model, Adam(model.parameters(), lr=0.1)


def whole(strategy: unitrain.Strategy, model: nn.Module, optimizer: Adam) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = {
        (number, key): strategy.full_tensor(value).clone()
        for number, p in enumerate(parameters)
        for key, value in optimizer.state.get(p, {}).items()
    }
    of_all = {key: value for found in strategy.communicator.all_gather_object(own) for key, value in found.items()}
    return [*strategy.export(model).state_dict().values(), *(of_all[key] for key in sorted(of_all))]


def save(url: str, settings: dict[str, Any]) -> list[Tensor]:
    """Save after each of three steps, the last time in vain, as rank 1 fails. Return weights and state before."""
    with unitrain.init(device="cpu", timeout_s=30, **settings) as strategy:
        model, optimizer = strategy.prepare(*made())
        checkpoint = strategy.checkpoint(url, model=model, optimizer=optimizer)
        for step in range(3):
            strategy.step(model(torch.randn(4, WIDTH)).square().mean(), optimizer)
            checkpoint.wait()
            if step < 2:
                checkpoint.save()
                checkpoint.wait()
                kept = [value.clone() for value in whole(strategy, model, optimizer)]
        write = Mock(side_effect=OSError("it burns")) if strategy.rank == 1 else saving.write_shards
        fails = pytest.raises(CheckpointError, match="rank 1 could not write its shards: OSError: it burns")
        with patch.object(saving, "write_shards", write), fails:
            checkpoint.save()
            checkpoint.wait()
        return kept


def resume(url: str, settings: dict[str, Any]) -> tuple[int, list[str], list[Tensor]]:
    """Resume, and return the step, what was downloaded, and weights and state."""
    with unitrain.init(device="cpu", timeout_s=30, **settings) as strategy:
        torch.manual_seed(strategy.rank)
        model, optimizer = strategy.prepare(*made())
        checkpoint = strategy.checkpoint(url, model=model, optimizer=optimizer)
        with patch.object(Objects, "file", autospec=True, side_effect=Objects.file) as file:
            assert checkpoint.resume()
        downloaded = [call.args[1].rpartition("/")[2] for call in file.call_args_list]
        step, found = strategy.global_step, whole(strategy, model, optimizer)
        strategy.step(model(torch.randn(4, WIDTH)).square().mean(), optimizer)
        return step, downloaded, found


FSDP: dict[str, Any] = {"backend": "fsdp"}
OWNED: dict[str, Any] = {"backend": "ddp", "shard_optimizer": True}
SHARDS = [f"__{rank}_0.distcp" for rank in range(3)]


@pytest.mark.slow("three ranks import a library for S3, and open four sessions")
def test_each_rank_writes_and_reads_its_own(s3_url: str) -> None:
    expected = run_ranks(save, s3_url, FSDP, nprocs=3)[0]
    names = set(objects(s3_url))
    for step in (1, 2):
        folder = f"step-000000000{step}"
        found = {name.removeprefix(f"{folder}/") for name in names if name.startswith(folder)}
        assert found == {"_run.pt", ".metadata", "manifest.json", *SHARDS}
    assert ".lock" not in names

    for rank, (step, downloaded, state) in enumerate(run_ranks(resume, s3_url, FSDP, nprocs=3)):
        assert step == 2
        assert [name for name in downloaded if name in SHARDS] == [SHARDS[rank]]
        assert (downloaded == [SHARDS[rank]]) == (rank > 0)
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
    for step, downloaded, state in run_ranks(resume, s3_url, FSDP):
        assert step == 2
        assert len(downloaded) == len(set(downloaded))
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
    # Rank 0 sends weights that are not divided now, so it needs all; the other one needs its part of Adam's state.
    (step, downloaded, state), (_, fewer, other) = run_ranks(resume, s3_url, OWNED)
    assert step == 2
    assert set(SHARDS) < set(downloaded)
    assert set(fewer) <= set(SHARDS)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    torch.testing.assert_close(other, expected, rtol=0, atol=0)

    # A change in what another rank than 0 verifies: the checkpoint before is taken.
    content = objects(s3_url)[f"step-0000000002/{SHARDS[2]}"]
    changed = bytearray(content)
    changed[random.Random(0).randrange(len(changed))] ^= 1
    put(f"{s3_url}/step-0000000002/{SHARDS[2]}", bytes(changed))
    assert [step for step, _, _ in run_ranks(resume, s3_url, FSDP, nprocs=3)] == [1, 1, 1]
