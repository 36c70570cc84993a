"""Within a round of ``local_sgd``: the weights that ranks share, and what needs equal weights and is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import merged, model_of, weights
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import unitrain
from unitrain import UsageError
from unitrain.features.ema import EMA
from unitrain.features.safetensors import load_weights, save_weights

STEPS = 3
SETTINGS: dict[str, Any] = {"precision": "fp64", "device": "cpu", "timeout_s": 30, "local_sgd": {"steps": STEPS}}


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def outputs(folder: str) -> None:
    """Compare what ranks evaluate, export and save within a round with fragments."""
    settings = {"local_sgd": {"steps": 4, "fragments": 2}}
    with unitrain.init(**merged(SETTINGS, settings)) as strategy, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the run has ended within a round")
        model = nn.Sequential(model_of(), Counting())
        prepared, optimizer = strategy.prepare(model, adamw(model))
        for step in range(5):
            strategy.step(prepared(torch.ones(2, 4) * (1 + strategy.rank + step)).sum(), optimizer)
        own = weights(model).clone()
        strategy.check_in_sync(prepared)
        with strategy.evaluation(prepared):
            shared = weights(model).clone()
            strategy.check_in_sync(prepared)
            assert torch.equal(weights(strategy.export(prepared)), shared)
        assert not torch.equal(own, shared)
        assert torch.equal(weights(strategy.export(prepared)), shared)
        save_weights(strategy, prepared, folder)
        with pytest.raises(UsageError, match=r"save\(\) was called after step 1 of a round of 4 .*after the epoch"):
            strategy.save(prepared, f"{folder}/model.pt")
        assert torch.equal(weights(model), own)
        with pytest.raises(UsageError, match=r"load_weights\(\) was called after step 1 of a round of 4"):
            load_weights(strategy, prepared, folder)
        saved = load_file(f"{folder}/model.safetensors")
        assert torch.equal(torch.cat([saved[name].reshape(-1) for name, _ in model.named_parameters()]), shared)


class Counting(nn.Module):
    """Has a buffer that a forward changes, differently on each rank."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.total = self.total + inputs.detach().sum()
        return inputs


def test_evaluation_and_exports_have_the_shared_weights_within_a_round_with_fragments(tmp_path: Path) -> None:
    run_ranks(outputs, str(tmp_path / "weights"))


def buffers() -> list[float]:
    """Return a buffer that counts the forwards of rank 0 and twice those of rank 1, after each step of two rounds."""
    with unitrain.init(**SETTINGS) as strategy:
        counting = Counting()
        model = nn.Sequential(counting, model_of())
        prepared, optimizer = strategy.prepare(model, adamw(model))
        totals = []
        for _ in range(2 * STEPS):
            strategy.step(prepared(torch.full((1 + strategy.rank, 4), 0.25)).sum(), optimizer)
            totals.append(counting.total.item())
    return totals


def test_buffers_are_each_ranks_own_within_a_round_and_rank_0s_after_it() -> None:
    first, second = run_ranks(buffers)
    alone = [float(step + 1) for step in range(2 * STEPS)]
    assert first == alone
    # As a broadcast in every step would make them, they are equal only where a round ends.
    assert second == [2.0, 4.0, 3.0, 5.0, 7.0, 6.0]


def refused() -> list[str]:
    said = []

    def ask(call: Callable[[], object]) -> None:
        with pytest.raises(UsageError) as raised:
            call()
        said.append(str(raised.value))

    with unitrain.init(**SETTINGS) as strategy:
        model = model_of()
        prepared, optimizer = strategy.prepare(model, adamw(model))
        strategy.step(prepared(torch.ones(2, 4)).sum() * strategy.rank, optimizer)
        other = SGD(model.parameters(), lr=0.1)
        for call in (
            lambda: strategy.evaluation(prepared).__enter__(),
            lambda: strategy.export(prepared),
            lambda: strategy.check_in_sync(prepared),
            lambda: strategy.add(EMA(prepared)),
            lambda: strategy.step(prepared(torch.ones(2, 4)).sum(), other),
        ):
            ask(call)
        with pytest.warns(UserWarning, match=r"its last 1 steps were not averaged over the ranks"):
            strategy.close()
    with unitrain.init(**merged(SETTINGS, {"local_sgd": {"steps": 8, "fragments": 5}})) as strategy:
        prepared, optimizer = strategy.prepare(model, adamw(model))
        ask(lambda: strategy.step(prepared(torch.ones(2, 4)).sum(), optimizer))
    with unitrain.init(**SETTINGS) as strategy:
        model = model_of()
        model[0].weight.requires_grad_(False)
        prepared, optimizer = strategy.prepare(model, adamw(model))
        for _ in range(STEPS - 1):
            strategy.step(prepared(torch.ones(2, 4)).sum(), optimizer)
        model[0].weight.requires_grad_(True)
        ask(lambda: strategy.step(prepared(torch.ones(2, 4)).sum(), optimizer))
    return said


def test_what_needs_equal_weights_is_refused_within_a_round() -> None:
    [said] = {tuple(one) for one in run_ranks(refused, nprocs=1)}
    assert all("called after step 1 of a round of 3 (local_sgd.steps)" in one for one in said[:3])
    assert said[3:] == (
        "an EMA averages weights after each step, and with local_sgd, ranks have different ones within a round.",
        "local_sgd supports one optimizer: give it all parameters, in groups.",
        "local_sgd.fragments is 5, but only 4 parameters are trained, and each fragment needs one: set it to fewer.",
        "a parameter was unfrozen within a round of local_sgd: change it after an epoch.",
    )
