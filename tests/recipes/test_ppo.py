"""The PPO recipe: its rollouts, its advantages, and a run that is stopped within a round."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from recipe_runs import run_recipe
from torch import Tensor

import unitrain
from unitrain import ConfigError, Stopped
from unitrain.recipes.reinforcement_learning.models import ActorCritic
from unitrain.recipes.reinforcement_learning.rollouts import Environments, Rollout, advantages

CPU = torch.device("cpu")
SMALL = ["--environments=4", "--steps=64", "--batch-size=64", "--rounds=3", "--epochs=2", "--strategy.precision=fp64"]


@torch.no_grad()
def rollout(numbers: list[int], steps: int = 120) -> tuple[ActorCritic, Rollout]:
    """Let an untrained policy act in environments of these numbers."""
    torch.manual_seed(1)
    policy = ActorCritic(4, 2).double()
    policy.actor[-1].bias[1] = 1.0  # with a probability of about 0.7
    policy.register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
    return policy, Environments("CartPole-v1", numbers).rollout(policy, steps, (0, 3), 0.99, 0.95, CPU)


def test_an_environment_does_the_same_on_any_rank() -> None:
    _, together = rollout([0, 1, 2])
    parts = [rollout(numbers)[1] for numbers in ([0], [1, 2])]
    for all_of_them, *divided in zip(together, *parts, strict=True):
        torch.testing.assert_close(torch.cat(divided), all_of_them, rtol=1e-12, atol=1e-12)


def test_a_rollout_is_gymnasium_s_and_the_policy_s() -> None:
    policy, found = rollout([5])
    random = np.random.default_rng((0, 3, 5))
    random.gumbel(size=(120, 2))
    environment = gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(seed=int(random.integers(2**31)))
    lengths, begin = [], 0
    for step, action in enumerate(found.actions.tolist()):
        assert found.observations[step].tolist() == observation.tolist()
        observation, reward, terminated, truncated, _ = environment.step(action)
        assert reward == 1
        if terminated or truncated:
            lengths.append(step + 1 - begin)
            begin = step + 1
            observation, _ = environment.reset()
    assert found.returns.tolist() == lengths
    assert len(lengths) > 2
    logits, values = policy(found.observations)
    expected = logits.softmax(1)[range(120), found.actions].log()
    torch.testing.assert_close(found.log_probs, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.targets - found.advantages, values, rtol=0, atol=1e-9)


def test_actions_have_the_policy_s_probabilities() -> None:
    policy, found = rollout([0], 4000)
    expected = policy(found.observations)[0].softmax(1)[:, 1].mean()
    assert found.actions.double().mean() == pytest.approx(expected.item(), abs=0.03)


def test_advantages_are_the_formula_s() -> None:
    random = torch.Generator().manual_seed(0)
    rewards, values, following = torch.randn(3, 2, 9, generator=random, dtype=torch.float64)
    terminated, truncated = torch.rand(2, 2, 9, generator=random) < 0.2
    ended = terminated | truncated
    assert (ended & ~terminated).any()
    assert terminated.any()
    found = advantages(rewards, values, following, terminated, ended, 0.9, 0.8)
    for row in range(2):
        for step in range(9):
            expected = 0.0
            for later in range(step, 9):
                at = row, later
                error = rewards[at] + (0 if terminated[at] else 0.9 * following[at]) - values[at]
                expected += (0.9 * 0.8) ** (later - step) * error.item()
                if ended[row, later]:
                    break
            assert found[row, step].item() == pytest.approx(expected, rel=1e-12)


def train(output: str, backend: str, stop_after: int | None = None) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Run the recipe, or let rank 0 be stopped by a signal after this many steps."""
    step, steps = unitrain.Strategy.step, 0

    def stopping(*arguments: Any, **keywords: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == stop_after and os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")) == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments, **keywords)

    with mock.patch.object(unitrain.Strategy, "step", stopping):
        if stop_after is None:
            lines = run_recipe("ppo", *SMALL, f"--strategy.backend={backend}", output=output)
            return lines, torch.load(Path(output, "model.pt"), weights_only=True)
        with pytest.raises(Stopped):
            run_recipe("ppo", *SMALL, f"--strategy.backend={backend}", output=output)
    return [], {}


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=[HOROVOD, pytest.mark.all("ddp has it")])])
def test_a_run_stopped_within_a_round_ends_with_the_undisturbed_weights(tmp_path: Path, backend: str) -> None:
    expected_lines, expected = run_ranks(train, str(tmp_path / "whole"), "single", nprocs=1, launcher="python")[0]
    output = str(tmp_path / "stopped")
    run_ranks(train, output, backend, 11)  # within the second round of eight steps
    lines, weights = run_ranks(train, output, "single", nprocs=1, launcher="python")[0]
    assert [line["world_size"] for line in lines] == [2, 2, 1]
    for line, wanted in zip(lines, expected_lines, strict=True):
        for name in ("step", "mean_return", "policy_loss", "value_loss", "entropy"):
            assert line[name] == pytest.approx(wanted[name], rel=1e-9), name
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-12)


@pytest.mark.soak
def test_defaults_balance_the_pole(tmp_path: Path) -> None:
    assert run_recipe("ppo", output=tmp_path)[-1]["mean_return"] >= 475


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--environment Nothing-v1", "environment Nothing-v1 can't be made: .*Nothing"),
        ("--environment MountainCarContinuous-v0", "has observations Box.* and actions Box.*, but the recipe's"),
        ("--strategy.accumulate 2", "normalises advantages over a whole minibatch: set strategy.accumulate to 1"),
    ],
)
def test_what_can_not_be_is_refused(tmp_path: Path, flags: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_recipe("ppo", *flags.split(), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def too_few(output: str) -> None:
    with pytest.raises(ConfigError, match="environments is 1, but there are 2 processes, and each needs one"):
        run_recipe("ppo", "--environments=1", output=output)


def test_each_process_needs_an_environment(tmp_path: Path) -> None:
    run_ranks(too_few, str(tmp_path / "out"))
