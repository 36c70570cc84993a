"""``on_spike``: a step with unusually large gradients is reported, skipped, or the last one, on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from plain_loop import model_of, sgd, strategy_of, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils._pytree import tree_leaves

import unitrain
from unitrain import ConfigError, Stopped, Strategy, UsageError
from unitrain.features.ema import EMA
from unitrain.training.loop.step import StepResult

NORMAL = 64


def train(strategy: Strategy, factors: list[float]) -> tuple[list[StepResult], list[Tensor]]:
    """Make a step for each factor of the loss; return the results, and the weights after each step."""
    model, optimizer = strategy.prepare(module := model_of(), sgd(module))
    inputs = torch.ones(2, 4, dtype=torch.float64) * (1 + strategy.rank)
    results, after = [], []
    for factor in factors:
        results.append(strategy.step(model(inputs).sum() * factor, optimizer))
        after.append(weights(strategy.export(model)))
    return results, after


def usual(steps: int) -> list[float]:
    return [0.01 * (1 + step % 3) for step in range(steps)]


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.01}, {"accumulate": 2}], ids=str)
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


SPIKE_AT, COPIED_EVERY = 140, 64
State = tuple[list[Tensor], list[Tensor], list[Any]]
"""Tensors of which all ranks have the same, after a rewind at least; moments of this rank; and the learning rate."""


def rewound(folder: str, settings: dict[str, Any]) -> tuple[dict[int, State], int]:
    """Train with a spike; return the state after some steps, and the steps of the run."""
    copies = {"every": COPIED_EVERY, "folder": f"{folder}/memory"}
    given: dict[str, Any] = {"on_spike": "rewind", "memory_copies": copies, **settings}
    with unitrain.init(device="cpu", precision="fp64", timeout_s=60, **given) as strategy:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer := Adam(model.parameters(), 0.01), 0.99)
        net, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
        average = strategy.add(EMA(net, 0.9))
        strategy.checkpoint(f"{folder}/run", model=net, optimizer=optimizer, scheduler=scheduler, average=average)
        generator = torch.Generator().manual_seed(strategy.rank)
        after = {}
        for step in range(1, SPIKE_AT + 2):
            inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64)
            factor = 1e4 if step == SPIKE_AT else 1.0
            strategy.step(net(inputs).square().mean() * factor, optimizer, scheduler)
            if step in (COPIED_EVERY, SPIKE_AT - 1, SPIKE_AT, SPIKE_AT + 1):
                moments = tree_leaves(list(optimizer.state.values()))
                shared = [*net.parameters(), *net.buffers(), *average.state_dict().values()]
                whole = [[strategy.full_tensor(one.detach()).clone() for one in some] for some in (shared, moments)]
                after[step] = whole[0], whole[1], scheduler.get_last_lr()
        return after, strategy.global_step


@pytest.mark.parametrize(
    ("settings", "world"),
    [
        ({"backend": "single"}, 1),
        ({"backend": "ddp", "shard_optimizer": True}, 2),
        pytest.param({"backend": "horovod"}, 2, marks=HOROVOD),
        pytest.param({"backend": "fsdp"}, 2, marks=pytest.mark.all("ddp has a sharded state, too")),
    ],
    ids=str,
)
def test_a_rewind_goes_back_to_a_copy_in_memory_with_everything_but_the_schedule(
    settings: dict[str, Any], world: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = run_ranks(rewound, str(tmp_path), settings, nprocs=world)
    for after, steps in runs:
        (_, _, rate_before), (back, moments, rate_then), (on, _, rate_after) = (after[SPIKE_AT + i] for i in (-1, 0, 1))
        assert all(map(torch.equal, back, runs[0][0][COPIED_EVERY][0])), "copies are of steps 64 and 128"
        assert all(map(torch.equal, moments, after[COPIED_EVERY][1]))
        assert not any(torch.equal(now, then) for now, then in zip(on, back, strict=True) if now.numel() > 1)
        assert rate_then == rate_before > rate_after
        assert steps == SPIKE_AT + 1
    assert capfd.readouterr().out.count("The weights are those after step 64 again, and the next batch follows") == 1


def test_a_rewind_needs_copies_in_memory() -> None:
    said = r"on_spike is 'rewind', and memory_copies\.every is 0; .*: rewind goes back to a copy in memory"
    with pytest.raises(ConfigError, match=said):
        unitrain.init(backend="single", on_spike="rewind", memory_copies={"every": 0})
    with strategy_of(on_spike="rewind") as strategy, pytest.raises(UsageError, match=r"call strategy\.checkpoint"):
        train(strategy, usual(1))


def test_a_step_is_skipped_where_no_copy_is_old_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with strategy_of(on_spike="rewind", memory_copies={"folder": str(tmp_path / "memory"), "every": 50}) as strategy:
        strategy.checkpoint(tmp_path / "run", model=nn.Linear(1, 1))
        results, _ = train(strategy, [*usual(NORMAL), 3.0, 0.01])
    assert [result.skipped for result in results[-2:]] == [True, False]
    assert "The step was skipped on all ranks." in capsys.readouterr().out


@pytest.mark.parametrize(("replaces", "said"), [(False, "The weights are those after step"), (True, "was skipped on")])
def test_a_rewind_goes_back_to_no_copy_of_an_object_that_was_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], replaces: bool, said: str
) -> None:
    copies = {"folder": str(tmp_path / "memory"), "every": 20}
    with strategy_of(on_spike="rewind", memory_copies=copies) as strategy:
        checkpoint = strategy.checkpoint(tmp_path / "run", partial=True, model=nn.Linear(1, 1))
        train(strategy, usual(2 * NORMAL))
        if replaces:
            checkpoint.add(model=nn.Linear(1, 1))
        train(strategy, [*usual(20), 3.0])
    assert said in capsys.readouterr().out


def on_ranks(folder: str, backend: str, factors: list[float]) -> list[bool]:
    with unitrain.init(backend=backend, device="cpu", precision="fp64", on_spike="skip", timeout_s=30) as strategy:
        model, optimizer = strategy.prepare(module := model_of(), sgd(module))
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


@pytest.mark.parametrize("policy", ["skip", "rewind"])
@pytest.mark.parametrize("other", [{"local_sgd": {"steps": 2}}, {"compression": "powersgd"}])
def test_it_is_refused_where_ranks_would_decide_apart(policy: Any, other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(other))}.*mutually exclusive"):
        unitrain.init(backend="single", on_spike=policy, **other)
