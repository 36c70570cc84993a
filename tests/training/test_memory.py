"""What prepare and resume take beyond the state that they leave: a few buffers, whatever the size of the state."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.optim import Adam

import unitrain

MB = 2**20
MODEL_MB, ALLOWED_MB = 96, 64  # a copy of the model would be noticed


def made() -> tuple[nn.Module, Adam]:
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(MODEL_MB // 4)])
    return model, Adam(model.parameters())


def resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def beyond(call: Callable[[], object], makes: int) -> float:
    """Return by how much a call exceeds what was resident before and the state that it makes, in MB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # from now on, VmHWM is the peak
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before - makes


def measure(folder: str) -> dict[str, float]:
    """Save and resume a model and Adam's state, and return what each call took beyond the final state, in MB."""
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        model, optimizer = made()
        adam = sum(p.nbytes for p in model.parameters()) * 2 // MB
        if strategy.is_main:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        found = {"prepare": beyond(lambda: strategy.prepare(model, optimizer), 0 if strategy.is_main else adam)}
        checkpoint = strategy.checkpoint(folder, background=False, model=model, optimizer=optimizer)
        checkpoint.save()
        checkpoint.close()
        fresh, fresh_optimizer = made()
        strategy.prepare(fresh, fresh_optimizer)
        checkpoint = strategy.checkpoint(folder, model=fresh, optimizer=fresh_optimizer)
        found["resume"] = beyond(checkpoint.resume, adam)
        assert all(
            torch.equal(one, other)
            for mine, theirs in zip(optimizer.state.values(), fresh_optimizer.state.values(), strict=True)
            for one, other in zip(mine.values(), theirs.values(), strict=True)
        )
        found["resume again"] = beyond(checkpoint.resume, 0)
        return found


LAYERS, LAYER_MB = 8, 36  # more than 32: glibc keeps smaller blocks for the next call


def measure_shards(folder: str) -> dict[str, float]:
    """Build, prepare and resume a model of which each rank has a part. Return what a call took beyond that, in MB."""

    def layers() -> nn.Module:
        return nn.Sequential(*[nn.Linear(3072, 3072, bias=False) for _ in range(LAYERS)])

    with unitrain.init(backend="fsdp", device="cpu") as strategy:
        strategy.prepare(nn.Linear(2, 2))  # imports what it needs
        kept: list[nn.Module] = []
        share = LAYERS * LAYER_MB // strategy.world_size
        with torch.device("meta"):
            found = {"build": beyond(lambda: kept.append(layers()), 0)}
        model, optimizer = kept[0], Adam(kept[0].parameters())
        found["prepare"] = beyond(lambda: strategy.prepare(model, optimizer, initialise=True), share)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        strategy._step.checks.direct.allowed = True  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        checkpoint = strategy.checkpoint(folder, background=False, model=model, optimizer=optimizer)
        checkpoint.save()
        checkpoint.close()
        with torch.device("meta"):
            fresh = layers()
        fresh_optimizer = Adam(fresh.parameters())
        found["prepare without weights"] = beyond(lambda: strategy.prepare(fresh, fresh_optimizer), share)
        checkpoint = strategy.checkpoint(folder, model=fresh, optimizer=fresh_optimizer)
        found["resume"] = beyond(checkpoint.resume, 2 * share)
        for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(
                strategy.communicator.sharding.to_local(one), strategy.communicator.sharding.to_local(other)
            )
        return found


@pytest.mark.all("measures a large model")
def test_no_rank_has_more_than_its_part_of_a_model_that_is_built_without_memory(tmp_path: Path) -> None:
    for found in run_ranks(measure_shards, str(tmp_path), fresh=True):
        assert {name: mb for name, mb in found.items() if mb > 5 * LAYER_MB} == {}, found


def test_nothing_is_held_twice(tmp_path: Path) -> None:
    for found in run_ranks(measure, str(tmp_path), fresh=True):
        assert {name: mb for name, mb in found.items() if mb > ALLOWED_MB} == {}
