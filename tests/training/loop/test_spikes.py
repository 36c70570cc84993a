"""``on_spike``: a step with unusually large gradients is reported, skipped, or the last one, on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import model_of, sgd, strategy_of, weights
from ranks import run_ranks
from torch import Tensor

import unitrain
from unitrain import ConfigError, Stopped, Strategy
from unitrain.training.loop.step import StepResult

NORMAL = 64


def train(strategy: Strategy, factors: list[float]) -> tuple[list[StepResult], list[Tensor]]:
    """Make a step for each factor of the loss; return the results, and the weights after each step."""
    model, optimizer = strategy.prepare(*(lambda made: (made, sgd(made)))(model_of()))
    inputs = torch.ones(2, 4, dtype=torch.float64) * (1 + strategy.rank)
    results, after = [], []
    for factor in factors:
        results.append(strategy.step(model(inputs).sum() * factor, optimizer))
        after.append(weights(strategy.export(model)))
    return results, after


def usual(steps: int) -> list[float]:
    return [0.01 * (1 + step % 3) for step in range(steps)]


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.01}, {"clip_value": 0.01}, {"accumulate": 2}], ids=str)
def test_a_spike_is_skipped_and_a_step_that_is_a_little_larger_is_not(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    micro_batches = settings.get("accumulate", 1)
    factors = [factor for factor in [*usual(NORMAL), 0.05, 3.0, 0.03] for _ in range(micro_batches)]
    with strategy_of(on_spike="skip", **settings) as strategy:
        results, after = train(strategy, factors)
    larger, spike, last = results[micro_batches - 1 :: micro_batches][-3:]
    assert (larger.stepped, spike.stepped, spike.skipped, last.stepped) == (True, False, True, True)
    assert spike.grad_norm is not None
    assert torch.equal(after[-2 * micro_batches], after[-micro_batches - 1])
    assert not torch.equal(after[-1], after[-micro_batches - 1])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "spike" in line]
    assert line.startswith(f"unitrain: spike at step {NORMAL + 2}: the norm of the gradients is ")
    assert line.endswith(f"on average over the {NORMAL + 1} steps before. The step was skipped on all ranks.")


def test_a_warning_changes_nothing_and_a_stop_is_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    factors = [*usual(NORMAL), 3.0, 0.01]
    with strategy_of() as strategy:
        _, expected = train(strategy, factors)
    with strategy_of(on_spike="warn") as strategy:
        results, after = train(strategy, factors)
    assert torch.equal(after[-1], expected[-1])
    assert all(result.stepped for result in results)
    assert capsys.readouterr().out.count("unitrain: spike at step 65") == 1
    with pytest.raises(Stopped) as stopped, strategy_of(on_spike="stop") as strategy:
        train(strategy, factors)
    assert stopped.value.code == 3
    assert "unitrain: stopped: spike at step 65" in capsys.readouterr().out


def test_a_level_that_stays_is_no_spike_for_long_and_the_first_steps_are_none() -> None:
    with strategy_of(on_spike="skip") as strategy:
        results, _ = train(strategy, [5.0, *usual(NORMAL), *[3.0] * 40])
    skipped = [i for i, result in enumerate(results) if result.skipped]
    assert skipped
    assert skipped[0] == NORMAL + 1
    assert skipped[-1] < NORMAL + 30


def on_ranks(folder: str, backend: str, factors: list[float]) -> list[bool]:
    with unitrain.init(backend=backend, device="cpu", precision="fp64", on_spike="skip", timeout_s=30) as strategy:
        model, optimizer = strategy.prepare(*(lambda made: (made, sgd(made)))(model_of()))
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        checkpoint.resume()
        inputs = torch.ones(2, 4, dtype=torch.float64) * (1 + strategy.rank)
        found = [strategy.step(model(inputs).sum() * factor, optimizer).skipped for factor in factors]
        checkpoint.save()
        return found


def test_all_ranks_skip_alike_also_after_a_resume_on_others(tmp_path: Path) -> None:
    run_ranks(on_ranks, str(tmp_path), "ddp", usual(NORMAL))
    for found in run_ranks(on_ranks, str(tmp_path), "fsdp", [3.0, 0.01]):
        assert found == [True, False]


def test_it_is_refused_where_ranks_would_decide_apart() -> None:
    for settings, other in (({"local_steps": 2}, "local_steps"), ({"compression": "powersgd"}, "compression")):
        with pytest.raises(ConfigError, match=rf"{other}.*mutually exclusive"):
            unitrain.init(backend="single", on_spike="skip", **settings)
