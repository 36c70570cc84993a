"""Checkpoints: complete or absent, verified, resumed in any world, and unable to execute code."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from saved_run import described, folder_of, steps_in, verified
from torch import Tensor, nn

import unitrain
from unitrain.checkpoint.sharded.opening import opened
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.located import DamagedError, checkpoint_at
from unitrain.checkpoint.store.store import NAME as MANIFEST

STEPS = 6
ABOUT: dict[str, Any] = {"world_size": 1, "strategy": {}, "config": {}}


class Net(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        # No bias before BatchNorm: its gradient is 0, and Adam would make steps of the rounding.
        self.layers = nn.Sequential(
            nn.Linear(4, width, bias=False), nn.BatchNorm1d(width), nn.Dropout(dropout), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def train(folder: str, until: int, settings: dict[str, Any], dropout: float = 0.0) -> tuple[list[float], Tensor]:
    """Train from wherever the checkpoint is up to step ``until``, save there, and return losses and weights."""
    with unitrain.init(**{"sync_batchnorm": True, **settings}) as strategy:
        torch.manual_seed(5)
        model = Net(dropout=dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model, optimizer, schedule = strategy.prepare(model, optimizer, schedule)
        data = torch.randn(24, 4, generator=torch.Generator().manual_seed(6))
        loader = strategy.dataloader(data, global_batch_size=7, shuffle=True)
        notes: dict[str, Any] = {"seen": 0, "sum": torch.zeros(())}
        checkpoint = strategy.checkpoint(
            folder, model=model, optimizer=optimizer, scheduler=schedule, loader=loader, notes=notes
        )
        checkpoint.resume()
        losses: list[float] = []
        step = notes["seen"]
        for _ in loader.epochs(100):
            for rows in loader:
                mean = strategy.meter()
                with strategy.autocast():
                    loss = model(rows).square().mean()
                mean.add(mean=loss, count=len(rows))
                losses.append(mean.value())
                strategy.step(loss, optimizer, schedule)
                step += 1
                notes["seen"] = step
                if step == until:
                    checkpoint.save()
                    return losses, torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
    raise AssertionError("unreachable")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("backend", "world", "launcher"), [("single", 1, "spawn"), ("ddp", 2, "spawn")])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, precision: str, backend: str, world: int, launcher: Any
) -> None:
    settings = {"backend": backend, "precision": precision}
    run = {"nprocs": world, "launcher": launcher}
    whole = run_ranks(train, str(tmp_path / "whole"), STEPS, settings, 0.3, **run)[0]
    first = run_ranks(train, str(tmp_path / "parts"), 2, settings, 0.3, **run)[0]
    second = run_ranks(train, str(tmp_path / "parts"), STEPS, settings, 0.3, **run)[0]
    assert first[0] + second[0] == whole[0]
    assert torch.equal(second[1], whole[1])


@HOROVOD
def test_any_world_and_backend_continues_what_another_began(tmp_path: Path) -> None:
    exact = {"precision": "fp64"}
    whole = run_ranks(train, str(tmp_path / "whole"), 8, {"backend": "single", **exact}, nprocs=1)[0]
    worlds: list[tuple[str, int, Any]] = [("horovod", 3, "horovodrun"), ("ddp", 2, "spawn"), ("single", 1, "spawn")]
    losses: list[float] = []
    for until, (backend, world, launcher) in zip((3, 5, 8), worlds, strict=True):
        settings = {"backend": backend, **exact}
        part = run_ranks(train, str(tmp_path / "parts"), until, settings, nprocs=world, launcher=launcher)[0]
        losses += part[0]
    assert losses == pytest.approx(whole[0], rel=1e-9)
    assert torch.allclose(part[1], whole[1], rtol=0, atol=1e-9)


def write(root: Path, step: int) -> Path:
    parts = {"model": {"weight": torch.full((50,), float(step))}, "notes": {"step": step}}
    Folder(Disk(root)).write(step, parts, ABOUT)
    return folder_of(root, step)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    files = [folder / name for name in ("model.pt", "notes.pt", MANIFEST)]
    drawn = random.Random(0)
    for _ in range(400):
        path = drawn.choice(files)
        original = path.read_bytes()
        bit = drawn.randrange(len(original) * 8)
        changed = bytearray(original)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises((DamagedError, unitrain.CheckpointError)):
            verified(folder)
        path.write_bytes(original)
    verified(folder)


class Evil:
    def __init__(self, witness: str) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.witness}",)


@pytest.mark.parametrize("name", ["model.pt", "notes.pt"])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    witness = tmp_path / "was_here"
    folder = write(tmp_path / "run", 1)
    torch.save(Evil(str(witness)), folder / name)
    described(folder)  # as an attacker would
    with pytest.raises(unitrain.CheckpointError, match=r"system is neither .* pickled code is never run"):
        opened(checkpoint_at(folder))
    assert not witness.exists()


def test_a_full_disk_is_named_and_what_was_saved_is_intact(small_disk: Path) -> None:
    write(small_disk, 1)
    big = {"model": {"weight": torch.zeros(2**20)}}
    with pytest.raises(unitrain.CheckpointError, match=rf"{small_disk}.*No space left.*bytes are free"):
        Folder(Disk(small_disk)).write(2, big, {})
    assert [path.name for path in small_disk.iterdir()] == ["step-0000000001"]
    verified(small_disk / "step-0000000001")


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    with unitrain.init(backend="single") as strategy:
        checkpoint = strategy.checkpoint(tmp_path, background=False, model=Net(), notes={"a": 1})
        checkpoint.save()
        checkpoint.close()
        wide, notes = Net(width=9), {"a": 2}
        before = wide.layers.state_dict()["0.weight"].clone()
        other = strategy.checkpoint(tmp_path, model=wide, notes=notes)
        message = r"layers.0.weight is \(8, 4\) float32 in the checkpoint, but \(9, 4\) float32 in this run"
        with pytest.raises(unitrain.CheckpointError, match=message):
            other.resume()
        assert torch.equal(wide.layers.state_dict()["0.weight"], before)
        assert notes == {"a": 2}
        other.close()
        with pytest.raises(unitrain.CheckpointError, match=r"contains model, notes, but this run has model, more"):
            strategy.checkpoint(tmp_path, model=Net(), more={}).resume()


def unwritable(folder: str, look: bool) -> tuple[str, int]:
    with unitrain.init(backend="ddp") as strategy:
        model, optimizer = strategy.prepare(module := nn.Linear(2, 1), torch.optim.SGD(module.parameters(), lr=0.1))
        checkpoint = strategy.checkpoint(folder, model=model, notes={"code": lambda: None})
        checkpoint.save()
        try:
            if look:
                checkpoint.save()
            for _ in range(10_000):
                strategy.step(model(torch.ones(1, 2)).sum() * 0, optimizer)
        except unitrain.CheckpointError as error:
            return str(error), strategy.global_step
        return "nothing", strategy.global_step


@pytest.mark.parametrize("look", [False, True])
def test_a_write_that_fails_in_the_background_is_told_to_every_rank(tmp_path: Path, look: bool) -> None:
    """At a step not long after, or at once where somebody looks."""
    said = run_ranks(unwritable, str(tmp_path / "run"), look)
    assert len(set(said)) == 1
    assert "could not be written" in said[0][0]
    assert look == (said[0][1] == 0)


def test_a_strategy_has_one_checkpoint_of_things_with_a_state(tmp_path: Path) -> None:
    with unitrain.init(backend="single") as strategy:
        with pytest.raises(unitrain.UsageError, match="lr is a float, which has no load_state_dict"):
            strategy.checkpoint(tmp_path, lr=0.1)
        strategy.checkpoint(tmp_path, model=nn.Linear(1, 1))
        with pytest.raises(unitrain.UsageError, match="one checkpoint"):
            strategy.checkpoint(tmp_path, model=nn.Linear(1, 1))
        assert not steps_in(tmp_path)


@pytest.mark.usefixtures("forked")
def test_a_script_may_end_with_a_save(tmp_path: Path) -> None:
    """Large enough to be still written when executors refuse work."""
    script = """
import torch, unitrain
strategy = unitrain.init(backend="single")
model = strategy.prepare(torch.nn.Linear(4000, 2000))
strategy.checkpoint("run", model=model).save()
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert steps_in(tmp_path / "run") == [0]
