"""With ``memory_copies.every: 1``, a failure costs at most one step, wherever it finds the ranks."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import unitrain
from unitrain.errors import UnitrainError

EPOCHS, STEPS_PER_EPOCH = 7, 3
ALL = -1
Fault = tuple[int, str, int]
"""The rank that fails, where, and after which step."""
LAST_COPY: dict[Any, str] = {"auto": "step-0000000001.1", 2: "step-0000000004.1"}
"""The newest copy when a rank fails after step 4, by ``memory_copies.every``."""
SETTINGS: dict[str, Any] = {"backend": "ddp", "sync_batchnorm": True}


def train(folder: Path, fault: Fault | None, every: Any, how: str = "kill") -> dict[str, Any]:
    """Train a model with buffers, a scheduler and dicts that change before the step, and return the final state."""
    copies = {"every": every, "folder": str(folder / "memory")}
    with unitrain.init(precision="fp64", device="cpu", timeout_s=30, memory_copies=copies, **SETTINGS) as strategy:

        def come_to(place: str) -> None:
            if fault is None or fault[1:] != (place, strategy.global_step) or fault[0] not in (strategy.rank, ALL):
                return
            if how == "raise":
                raise ValueError("an error of a rank")
            if every in LAST_COPY:  # it is written beside the training
                while not list(folder.glob(f"memory/*/{LAST_COPY[every]}/rank-0.json")):
                    time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = StepLR(optimizer, step_size=4, gamma=0.8)
        model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
        optimizer.register_step_post_hook(lambda *_: come_to("changed weights"))
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(*torch.split(torch.randn(22, 4, generator=generator).double(), [3, 1], 1))
        loader = strategy.dataloader(data, global_batch_size=8, shuffle=True)
        seen: dict[str, Any] = {"batches": 0, "steps": [], "epochs": {}}
        checkpoint = strategy.checkpoint(
            folder / "run", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, seen=seen
        )
        checkpoint.resume()
        for epoch in loader.epochs(EPOCHS):
            for inputs, targets in loader:
                seen["batches"] += 1
                seen["steps"].append(strategy.global_step)
                come_to("batch")
                loss = mse_loss(model(inputs), targets)
                come_to("forward")
                strategy.step(loss, optimizer, scheduler)
                come_to("update")
                if strategy.global_step % 5 == 0:
                    checkpoint.save(best=strategy.global_step == 5)
                if strategy.global_step == 5:
                    checkpoint.wait()
            with strategy.evaluation(model):
                come_to("evaluation")
                strategy.barrier()
            seen["epochs"][str(epoch)] = strategy.global_step
        return {
            "model": {key: value.tolist() for key, value in strategy.unwrap(model).state_dict().items()},
            "rate": scheduler.get_last_lr(),
            "seen": seen,
            "step": strategy.global_step,
        }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    state: dict[str, Any] = run_ranks(train, tmp_path_factory.mktemp("undisturbed"), None, 0)[0]
    assert state["step"] == EPOCHS * STEPS_PER_EPOCH
    return state


def fail(folder: Path, fault: Fault, every: Any = 1, how: str = "kill") -> None:
    with pytest.raises((UnitrainError, ValueError)):
        run_ranks(train, folder, fault, every, how)


def resumed_after(capfd: pytest.CaptureFixture[str]) -> int:
    said = capfd.readouterr()
    [step] = re.findall(r"resumed after step (\d+), from", said.out + said.err)
    return int(step)


@pytest.mark.parametrize(
    ("fault", "step", "how"),
    [
        ((1, "forward", 7), 7, "kill"),
        ((0, "batch", 18), 18, "kill"),  # rank 0 has the hub, and writes the copies
        ((1, "changed weights", 10), 10, "kill"),
        *(
            pytest.param(*other, marks=pytest.mark.all("another moment"))
            for other in (
                ((1, "update", 8), 7, "raise"),
                ((0, "update", 15), 14, "kill"),  # the other one waits for it in save()
                ((1, "evaluation", 9), 8, "kill"),  # it is begun again with the epoch's last batch
                ((ALL, "batch", 7), 7, "raise"),
            )
        ),
    ],
)
def test_the_training_is_the_one_to_which_nothing_happened(
    fault: Fault, step: int, how: str, tmp_path: Path, undisturbed: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    fail(tmp_path, fault, how=how)
    capfd.readouterr()
    again = run_ranks(train, tmp_path, None, 1)[0]
    assert resumed_after(capfd) == step
    assert again["seen"] == undisturbed["seen"], "each batch once, and no epoch's end left out"
    assert again["rate"] == undisturbed["rate"]
    for key, value in undisturbed["model"].items():
        torch.testing.assert_close(torch.tensor(again["model"][key]), torch.tensor(value), rtol=0, atol=1e-9)
    if step >= 5:
        assert (tmp_path / "run" / "best").resolve().name == "step-0000000005", "the best checkpoint is still known"


@pytest.mark.parametrize(("every", "steps"), [("auto", [1]), (2, [2, 4]), (0, [])])
def test_a_crash_costs_the_steps_since_the_last_copy(
    every: Any, steps: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fail(tmp_path, (1, "forward", 4), every)
    copies = sorted(copy.name for copy in tmp_path.glob("memory/unitrain-*/*"))
    assert copies == [f"step-{step:010d}.1" for step in steps]
    capfd.readouterr()
    run_ranks(train, tmp_path, None, every)
    if steps:
        assert resumed_after(capfd) == steps[-1]
    assert list(tmp_path.glob("memory/*/*")) == [], "a clean end removes them"
