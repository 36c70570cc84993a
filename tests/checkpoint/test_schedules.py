"""A run that is made longer: its schedule is as saved, with a message, or the longer one, as if it had always been."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim import lr_scheduler as schedulers

import unitrain
from unitrain import CheckpointError

Make = Callable[[SGD, int], Any]
SHORT, LONG = 6, 12  # steps


def sequential(optimizer: SGD, steps: int) -> Any:
    warmup = schedulers.LinearLR(optimizer, 0.1, total_iters=2)
    return schedulers.SequentialLR(optimizer, [warmup, cosine(optimizer, steps - 2)], milestones=[2])


def chained(optimizer: SGD, steps: int) -> Any:
    return schedulers.ChainedScheduler([cosine(optimizer, steps), schedulers.ExponentialLR(optimizer, 0.9)])


def cosine(optimizer: SGD, steps: int) -> Any:
    return schedulers.CosineAnnealingLR(optimizer, T_max=steps)


def milestones(optimizer: SGD, steps: int) -> Any:
    return schedulers.MultiStepLR(optimizer, [steps // 2, steps // 4])


SCHEDULES: list[tuple[Make, str]] = [
    (cosine, "scheduler's T_max is 6, not 12"),
    (lambda optimizer, steps: schedulers.OneCycleLR(optimizer, 0.1, steps), "scheduler's total_steps is 6, not 12"),
    (lambda optimizer, steps: schedulers.LinearLR(optimizer, 1, 0, steps), "scheduler's total_iters is 6, not 12"),
    (lambda optimizer, steps: schedulers.StepLR(optimizer, steps // 3), "scheduler's step_size is 2, not 4"),
    (milestones, "scheduler's milestones is [1, 3], not [3, 6]"),
    (lambda optimizer, steps: schedulers.CyclicLR(optimizer, 0.01, 0.1, steps // 2), "total_size is 6.0, not 12.0"),
    (lambda optimizer, steps: schedulers.LambdaLR(optimizer, lambda step: 1 - step / steps), ""),  # code is not saved
    (sequential, "scheduler's schedulers[1].T_max is 4, not 10"),
    (chained, "scheduler's schedulers[0].T_max is 6, not 12"),
]


def built(make: Make, steps: int) -> tuple[nn.Linear, SGD, Any]:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    return model, optimizer, make(optimizer, steps)


def resumed(folder: Path, make: Make, steps: int, new_options: bool, backend: str = "single") -> tuple[float, Tensor]:
    """Resume, train up to SHORT or LONG steps, and save. Return the learning rate and the weight at the end."""
    with unitrain.init(backend=backend, device="cpu", precision="fp64") as strategy:
        module, optimizer, scheduler = built(make, steps)
        model, optimizer, scheduler = strategy.prepare(module, optimizer, scheduler)
        checkpoint = strategy.checkpoint(
            folder, background=False, model=model, optimizer=optimizer, scheduler=scheduler
        )
        checkpoint.resume(new_options=new_options)
        while strategy.global_step < steps:
            strategy.step(model(torch.ones(2, 1).double()).square().mean(), optimizer, scheduler)
        checkpoint.save()
        return optimizer.param_groups[0]["lr"], module.weight.detach().clone()


def expected(make: Make) -> tuple[float, Tensor]:
    """Return the same of a plain loop, which changes its schedule."""
    model, optimizer, short = built(make, SHORT)
    _, other, long = built(make, LONG)
    for step in range(LONG):
        for key in ("lr", "momentum"):
            optimizer.param_groups[0][key] = (optimizer if step < SHORT else other).param_groups[0][key]
        optimizer.zero_grad()
        model(torch.ones(2, 1).double()).square().mean().backward()
        optimizer.step()
        other.step()
        if step < SHORT - 1:
            short.step()
        long.step()
    return other.param_groups[0]["lr"], model.weight.detach()


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(("make", "said"), SCHEDULES)
def test_a_longer_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Make, said: str) -> None:
    resumed(tmp_path, make, SHORT, False)
    capsys.readouterr()
    rate, weight = resumed(tmp_path, make, LONG, True)
    rate_of_loop, weight_of_loop = expected(make)
    assert rate == pytest.approx(rate_of_loop, abs=1e-12)
    torch.testing.assert_close(weight, weight_of_loop, rtol=1e-9, atol=0)
    assert "as saved" not in capsys.readouterr().err
    resumed(tmp_path / "kept", make, SHORT, False)
    capsys.readouterr()
    with suppress(ValueError):  # of OneCycleLR, which has no more steps
        resumed(tmp_path / "kept", make, LONG, False)
    assert said in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_a_longer_run_of_several_ranks(tmp_path: Path) -> None:
    run_ranks(resumed, tmp_path, sequential, SHORT, False, "ddp")
    rate, weight = expected(sequential)
    for rate_of_rank, weight_of_rank in run_ranks(resumed, tmp_path, sequential, LONG, True, "ddp"):
        assert rate_of_rank == pytest.approx(rate, abs=1e-12)
        torch.testing.assert_close(weight_of_rank, weight, rtol=1e-9, atol=0)


def test_another_scheduler_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    resumed(tmp_path, sequential, SHORT, False)
    said = r"scheduler is SequentialLR\(LinearLR, CosineAnnealingLR\) in the checkpoint, but CosineAnnealingLR in this"
    with pytest.raises(CheckpointError, match=rf"{said} run, .* resume\(new_options=True\).*Nothing was loaded"):
        resumed(tmp_path, cosine, LONG, False)
    *_, rates = built(cosine, LONG)
    for _ in range(LONG):
        rates.optimizer.step()
        rates.step()
    assert resumed(tmp_path, cosine, LONG, True)[0] == pytest.approx(rates.get_last_lr()[0], abs=1e-12)


def test_what_a_plateau_has_reached_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(lr: float, patience: int, weight_decay: float) -> dict[str, Any]:
        with unitrain.init(backend="single", device="cpu") as strategy:
            module = nn.Linear(1, 1)
            optimizer = SGD(module.parameters(), lr=lr, weight_decay=weight_decay)
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=patience)
            model, optimizer, plateau = strategy.prepare(module, optimizer, plateau)
            checkpoint = strategy.checkpoint(
                tmp_path, background=False, model=model, optimizer=optimizer, plateau=plateau
            )
            if not checkpoint.resume(new_options=True):
                strategy.step(model(torch.ones(1, 1)).sum(), optimizer)
                for _ in range(3):
                    plateau.step(1.0)
                checkpoint.save()
            return dict(optimizer.param_groups[0], patience=plateau.patience)

    assert run(0.1, 1, 0.0)["lr"] == pytest.approx(0.01)
    after = run(0.2, 5, 0.5)
    assert after["lr"] == pytest.approx(0.01)
    assert (after["weight_decay"], after["patience"]) == (0.5, 1)
    assert "made it: plateau's patience is 1, not 5. To train with the script's values, set" in capsys.readouterr().err
