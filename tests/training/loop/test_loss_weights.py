"""The weights of losses: one for all, or a separate one for each of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_loop import Ready, assert_equal, model_of, prepare_model, ready, sgd, strategy_of, weights
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader

import unitrain
from unitrain import UsageError
from unitrain.testing.models import Net, Twins, samples, step_by_hand

__all__ = ["ready"]  # the fixture
X = torch.arange(24, dtype=torch.float64).reshape(6, 4).sin()
Make = Callable[[dict[str, Any]], Any]


def test_weights_of_a_window_are_all_or_none(ready: Ready) -> None:
    strategy, model, optimizer = ready
    strategy.step(model(torch.ones(2, 4)).sum(), optimizer, weight=3)
    with pytest.raises(UsageError, match="weight="):
        strategy.step(model(torch.ones(2, 4)).sum(), optimizer)


def losses_of(model: nn.Module, rows: slice) -> dict[str, Tensor]:
    out = model(X[rows])
    return {"tokens": out.pow(2).mean(), "boxes": (out - 1).abs().mean()}


def listed(one: dict[str, Any]) -> list[Any]:
    return [one["tokens"], one["boxes"]]


FORMS: dict[str, tuple[Make, Make]] = {
    "dicts": (dict, lambda n: {"boxes": n["boxes"], "tokens": n["tokens"]}),
    "lists": (listed, listed),
    "a tensor": (listed, lambda n: torch.tensor(listed(n))),
    "tensors": (dict, lambda n: {name: torch.tensor(number) for name, number in n.items()}),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_loss_is_weighted_by_its_own_total(form: str) -> None:
    of_losses, of_weights = FORMS[form]
    strategy = strategy_of(accumulate=2)
    model, optimizer = prepare_model(strategy)
    expected = model_of()
    total = torch.zeros(())
    for rows, tokens, boxes in ((slice(0, 2), 3, 4), (slice(2, 6), 7, 1)):
        counts = of_weights({"tokens": tokens, "boxes": boxes})
        strategy.step(of_losses(losses_of(model, rows)), optimizer, weight=counts)
        losses = losses_of(expected, rows)
        total = total + losses["tokens"] * tokens / 10 + losses["boxes"] * boxes / 5
    step_by_hand(total, sgd(expected))
    assert_equal(model, expected)


def test_one_batch_of_one_process_has_the_gradient_of_the_sum_bit_for_bit() -> None:
    strategy = strategy_of()
    model, optimizer = prepare_model(strategy)
    expected = model_of()
    by_hand = sgd(expected)
    for _ in range(3):
        strategy.step(listed(losses_of(model, slice(6))), optimizer, weight=[49, 0.3])
        step_by_hand(sum(listed(losses_of(expected, slice(6)))), by_hand)
    assert torch.equal(weights(model), weights(expected))


def test_fp16_scales_all_of_them_and_an_overflow_of_one_skips() -> None:
    strategy = unitrain.init(backend="single", precision="fp16")
    model, expected = model_of().float(), model_of().float()
    model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
    x = X.float()
    with torch.autocast("cpu", torch.float16):
        out = expected(x).float()
    step_by_hand(out.pow(2).mean() + out.abs().mean(), SGD(expected.parameters(), lr=0.1))
    for factor in (1e35, 1.0):
        out = model(x).float()
        result = strategy.step([out.pow(2).mean() * factor, out.abs().mean()], optimizer, weight=[2, 3])
        assert result.skipped == (factor > 1)
    torch.testing.assert_close(weights(model), weights(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("form", "weight", "said"),
    [
        (listed, None, "a list of 2, but weight= is None: pass a weight for each loss"),
        (listed, [1], "a list of 2, but weight= is a list of 1"),
        (listed, 3, "a list of 2, but weight= is one int"),
        (listed, [1, None], "a list of 2, but weight= is a list of 2"),
        (listed, torch.ones(3), "a list of 2, but weight= is a list of 3"),
        (listed, {"tokens": 1, "boxes": 2}, "a list of 2, but weight= is a dict with 'tokens', 'boxes'"),
        (dict, {"tokens": 1, "box": 2}, "a dict with 'tokens', 'boxes', but weight= is a dict with 'tokens', 'box'"),
        (dict, [1, 2], "a dict with 'tokens', 'boxes', but weight= is a list of 2"),
        (dict, None, "a dict with 'tokens', 'boxes', but weight= is None"),
        (lambda losses: losses["tokens"], [1, 2], "one Tensor, but weight= is a list of 2"),
        (lambda losses: [], [], "a list of 0, but weight= is a list of 0"),
        (lambda losses: [losses["tokens"], 2.0], [1, 2], "a loss is a tensor, not float"),
        (lambda losses: [losses["tokens"], losses["boxes"].detach()], [1, 2], "the loss does not require grad"),
    ],
)
def test_losses_and_weights_that_do_not_match_are_refused(ready: Ready, form: Any, weight: Any, said: str) -> None:
    strategy, model, optimizer = ready
    with pytest.raises(UsageError, match=said):
        strategy.step(form(losses_of(model, slice(6))), optimizer, weight=weight)


@pytest.mark.parametrize(
    ("later", "said"),
    [(1, "pass the same losses to every backward of an accumulation window"), (3, "pass different losses")],
)
def test_a_window_has_the_same_losses_throughout(ready: Ready, later: int, said: str) -> None:
    strategy, model, optimizer = ready
    strategy.step([model(X).sum(), model(X).abs().sum()], optimizer, weight=[1, 2])
    with pytest.raises(UsageError, match=said):
        strategy.step([model(X).sum()] * later, optimizer, weight=[1] * later)


def marked_and_rest(out: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the mean losses of two kinds of elements, and how many there are of each: perhaps none."""
    squares, marked = (out - targets).pow(2), targets > 0.3
    losses = {"marked": squares[marked].sum() / marked.sum(), "rest": 3 * (squares[~marked].sum() / (~marked).sum())}
    return losses, {"marked": marked.sum(), "rest": (~marked).sum()}


def train(settings: dict[str, Any]) -> None:
    """Train with uneven batches and stand-ins, and compare with a plain loop."""
    with unitrain.init(precision="fp64", device="cpu", timeout_s=30, on_nonfinite="raise", **settings) as strategy:
        twins = Twins(strategy, lambda: Net(norm=settings.get("sync_batchnorm", False)))
        loader = strategy.dataloader(samples(10), global_batch_size=4)  # 4, 4, then 2
        for _ in loader.epochs(2):
            for inputs, targets in loader:
                losses, counts = marked_and_rest(twins.prepared(inputs), targets)
                strategy.step(losses, twins.optimizer, weight=counts)
            for inputs, targets in DataLoader(samples(10), batch_size=4):
                expected, _ = marked_and_rest(twins.expected(inputs), targets)
                step_by_hand(torch.stack(list(expected.values())).nansum(), twins.by_hand)
        twins.assert_same()


@pytest.mark.parametrize(
    ("nprocs", "settings"),
    [
        (2, {"backend": "ddp", "debug": True}),
        (3, {"backend": "ddp", "accumulate": 2}),
        (2, {"backend": "ddp", "sync_batchnorm": True}),
        (2, {"backend": "ddp", "deterministic": True, "accumulate": 3}),
        (2, {"backend": "ddp", "accumulate": 2, "shard_optimizer": True}),
        (3, {"backend": "fsdp", "accumulate": 2}),
    ],
    ids=str,
)
def test_ranks_with_different_numbers_of_each_train_as_one_process(nprocs: int, settings: dict[str, Any]) -> None:
    run_ranks(train, settings, nprocs=nprocs)


@pytest.mark.parametrize("names", [("c", ""), ("c", "d")])
@on_ranks()
def test_ranks_with_different_losses_are_told(names: tuple[str, str]) -> None:
    said = r"^the ranks, or the micro-batches of a window, pass different losses \(by number or by na"
    with unitrain.init(backend="ddp", precision="fp64", device="cpu", timeout_s=30) as strategy:
        twins = Twins(strategy)
        inputs, _ = next(iter(strategy.dataloader(samples(), global_batch_size=6)))
        losses = {name: twins.prepared(inputs).pow(2).mean() for name in ("a", "b", names[strategy.rank]) if name}
        with pytest.raises(UsageError, match=said):
            strategy.step(losses, twins.optimizer, weight=dict.fromkeys(losses, 1))


class Photos(torch.utils.data.Dataset[Any]):
    """Samples, of which some can't be read: on two ranks, one loses its whole part of a step."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        return None if i % 8 in (1, 3, 4) else samples(24)[i]


BLANK = (torch.full((4,), 7.0), torch.full((2,), 9.0))


def readable(parts: list[Any]) -> tuple[Any, int]:
    good = [part for part in parts if part is not None]
    return torch.utils.data.default_collate(good or [BLANK]), len(good)


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@on_ranks()
def test_samples_that_are_left_out_count_for_nothing(backend: str) -> None:
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=30) as strategy:
        twins = Twins(strategy, Net)
        for (inputs, targets), count in strategy.dataloader(Photos(), global_batch_size=4, collate_fn=readable):
            strategy.step(mse_loss(twins.prepared(inputs), targets), twins.optimizer, weight=count)
        for (inputs, targets), _ in DataLoader(Photos(), batch_size=4, collate_fn=readable):
            step_by_hand(mse_loss(twins.expected(inputs), targets), twins.by_hand)
        twins.assert_same()
