"""What a survivor saves is the state of the last boundary, wherever the failure finds the ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
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
from unitrain.job.watch import emergency
from unitrain.job.watch.emergency import Election
from unitrain.job.watch.messages import Candidate, Elect, Message, SaveEnded

EPOCHS, STEPS_PER_EPOCH = 7, 3
ALL = -1
Fault = tuple[int, str, int]
"""The rank that fails, where, and after which step."""


def train(folder: Path, fault: Fault | None, settings: dict[str, Any], how: str = "kill") -> dict[str, Any]:
    """Train a model with buffers, a scheduler and dicts that change before the step, and return the final state."""
    if how == "raise":  # on a busy machine, ranks do so further apart
        emergency._SAME_ERROR_S = 1.5
    with unitrain.init(precision="fp64", device="cpu", timeout_s=30, **settings) as strategy:

        def come_to(place: str) -> None:
            if fault is None or fault[1:] != (place, strategy.global_step):
                return
            if how == "weights":
                nn.init.zeros_(next(model.parameters()))
            elif how == "scheduler":
                scheduler.step()
            elif how == "list":
                seen["steps"].clear()
            if fault[0] in (strategy.rank, ALL):
                if how == "raise":
                    raise ValueError("an error of a rank")
                os.kill(os.getpid(), signal.SIGKILL)

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = StepLR(optimizer, step_size=4, gamma=0.8)
        model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
        optimizer.register_step_pre_hook(lambda *_: come_to("optimizer"))
        optimizer.register_step_post_hook(lambda *_: come_to("changed weights"))
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(*torch.split(torch.randn(22, 4, generator=generator).double(), [3, 1], 1))
        loader = strategy.dataloader(data, global_batch_size=8, shuffle=True)
        seen: dict[str, Any] = {"batches": 0, "steps": [], "epochs": {}}
        checkpoint = strategy.checkpoint(
            folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, seen=seen
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
                if strategy.global_step == 7:
                    with strategy.evaluation(model):
                        come_to("evaluation within an epoch")
                        strategy.barrier()
                if strategy.global_step % 5 == 0:
                    checkpoint.save(best=strategy.global_step == 5)
                if strategy.global_step == 5:
                    checkpoint.wait()
            with strategy.evaluation(model):
                come_to("evaluation")
                strategy.barrier()
            seen["epochs"][str(epoch)] = strategy.global_step
        come_to("end")
        return {
            "model": {key: value.tolist() for key, value in strategy.unwrap(model).state_dict().items()},
            "rate": scheduler.get_last_lr(),
            "seen": seen,
            "step": strategy.global_step,
        }


SETTINGS = {"backend": "ddp", "sync_batchnorm": True}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    state: dict[str, Any] = run_ranks(train, tmp_path_factory.mktemp("undisturbed"), None, SETTINGS)[0]
    assert state["step"] == EPOCHS * STEPS_PER_EPOCH
    return state


def saved(folder: Path) -> int:
    return max(int(name.removeprefix("step-")) for name in os.listdir(folder) if name.startswith("step-"))


def fail(folder: Path, fault: Fault, capfd: pytest.CaptureFixture[str], how: str = "kill", **settings: Any) -> str:
    with pytest.raises((UnitrainError, ValueError)):
        run_ranks(train, folder, fault, {**SETTINGS, **settings}, how)
    assert (max(folder.glob("step-*")) / "manifest.json").exists(), "the emergency checkpoint is whole, or not there"
    return said_by_ranks(capfd)


def said_by_ranks(capfd: pytest.CaptureFixture[str]) -> str:
    said = capfd.readouterr()
    return said.out + said.err


@pytest.mark.parametrize(
    ("fault", "step", "how"),
    [
        ((1, "forward", 7), 7, "kill"),
        ((0, "batch", 18), 18, "kill"),  # rank 0 has the hub, and the lists are long
        ((1, "update", 8), 8, "raise"),
        ((1, "changed weights", 10), 11, "kill"),  # the other one completes this step
        ((1, "update", 15), 15, "kill"),  # the other one waits for it in save()
        ((1, "evaluation", 9), 9, "kill"),
    ],
)
def test_the_training_is_the_one_to_which_nothing_happened(
    fault: Fault, step: int, how: str, tmp_path: Path, undisturbed: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(tmp_path, fault, capfd, how)
    survivor = 1 - fault[0]
    assert re.search(rf"emergency checkpoint: rank {survivor} has saved the state after step {step} in \S+step-0", said)
    assert saved(tmp_path) == step
    again = run_ranks(train, tmp_path, None, SETTINGS)[0]
    assert f"resumed after step {step}, from {tmp_path}/step-{step:010d}, an emergency checkpoint" in said_by_ranks(
        capfd
    )
    assert again["seen"] == undisturbed["seen"], "each batch once, and no epoch's end left out"
    assert again["rate"] == undisturbed["rate"]
    for key, value in undisturbed["model"].items():
        torch.testing.assert_close(torch.tensor(again["model"][key]), torch.tensor(value), rtol=0, atol=1e-9)
    best = (tmp_path / "best").resolve().name
    assert best == "step-0000000005", "the best checkpoint is still known"


def test_none_is_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = fail(tmp_path / "off", (1, "forward", 7), capfd, emergency_checkpoint="off")
    assert saved(tmp_path / "off") == 5
    assert "emergency" not in said

    said = fail(tmp_path / "saved", (1, "batch", 5), capfd)
    assert saved(tmp_path / "saved") == 5
    assert "emergency" not in said, "this step is saved already"

    said = fail(tmp_path / "all", (ALL, "batch", 7), capfd, "raise")
    assert saved(tmp_path / "all") == 5
    assert "emergency" not in said, "it would come again"


@pytest.mark.parametrize(
    ("place", "how", "why"),
    [
        ("evaluation within an epoch", "kill", "the script was in barrier after step 7, and not at its next batch"),
        ("batch", "weights", "weights were changed outside of strategy.step after step 7"),
        ("batch", "scheduler", "a scheduler was stepped outside of strategy.step after step 7"),
    ],
)
def test_a_state_that_is_not_that_of_a_boundary_is_not_saved(
    place: str, how: str, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(tmp_path, (1, place, 7), capfd, how)
    assert f"unitrain: no emergency checkpoint: rank 0: {why}.\n" in said
    assert saved(tmp_path) == 5


def test_what_a_script_has_removed_is_not_brought_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = fail(tmp_path, (1, "batch", 18), capfd, "list")
    assert "emergency checkpoint could not be written: a long list was shortened after the last step" in said
    assert saved(tmp_path) == 15


class Hub:
    """An election among three ranks, of which rank 1 has failed."""

    def __init__(self, ranks: Sequence[int] = (0, 2, 3)) -> None:
        self.sent: list[Message] = []
        self.election = Election(ranks, self.sent.append, until=10.0)

    def answer(self, **steps: int | None) -> None:
        for rank, step in steps.items():
            self.election.receive(int(rank[1:]), Candidate(step, "" if step else f"{rank} has none"))


def test_the_furthest_is_elected_and_the_first_of_several() -> None:
    hub = Hub()
    hub.answer(r0=7, r3=8)
    assert hub.sent == []
    hub.answer(r2=8)
    assert hub.sent == [Elect(2)]
    hub.election.receive(3, SaveEnded())
    assert hub.sent == [Elect(2)]
    hub.election.receive(2, SaveEnded())
    assert hub.sent == [Elect(2), Elect(None)]


def test_another_is_elected_if_the_first_is_killed() -> None:
    hub = Hub()
    hub.answer(r0=7, r2=8, r3=None)
    hub.election.gone(2)
    assert hub.sent == [Elect(2), Elect(0)]
    hub.election.gone(0)
    assert hub.sent[2:] == [Elect(None, "r3 has none")]


def test_nobody_waits_for_a_rank_that_does_not_answer() -> None:
    hub = Hub()
    hub.answer(r0=None, r3=7)
    hub.election.check(9.9)
    assert hub.sent == []
    hub.election.check(10.0)
    assert hub.sent == [Elect(3)]
    hub.answer(r2=8)
    assert hub.sent == [Elect(3)], "it has begun"


def test_nobody_has_a_whole_state() -> None:
    hub = Hub()
    hub.answer(r0=None, r2=None, r3=None)
    assert hub.sent == [Elect(None, "r0 has none")]
