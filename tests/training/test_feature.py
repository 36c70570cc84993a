"""Features of a script: its hooks, verdicts and state, as the page on features has them, on any backend."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from needs import FSDP, HOROVOD
from page_blocks import blocks
from places import ROOT
from plain_loop import data, model_of, sgd, strategy_of
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import unitrain
from unitrain import UsageError
from unitrain.training.loop.averaging import Averaging

STEPS = 12
OUTLIERS = {6, 10}
WINDOW = 4


def of_page(name: str) -> Any:
    """Return a class that the page defines."""
    [block] = [block for block in blocks(ROOT / "docs" / "guide" / "features.md") if f"class {name}(" in block.text]
    page = ast.parse(block.text)
    page.body = [part for part in page.body if isinstance(part, (ast.Import, ast.ImportFrom, ast.ClassDef))]
    names: dict[str, Any] = {"unitrain": unitrain, "torch": torch}
    exec(compile(page, block.place, "exec"), names)
    return names[name]


def train(folder: str, backend: str, first: int, last: int, late: bool) -> tuple[list[int], int, int]:
    """Return which steps were skipped, how many the feature counts, and how many norms it has, after these steps."""
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=30) as strategy:
        model, optimizer = strategy.prepare(model := model_of(), sgd(model))
        feature = of_page("SkipOutliers")(window=WINDOW)  # a short one
        if not late:
            strategy.add(feature)
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        checkpoint.resume()
        if late:
            assert strategy.add(feature) is feature
        skipped = []
        for step in range(first, last):
            loss = model(torch.ones(2, 4, dtype=torch.float64) * (1 + strategy.rank)).sum()
            if strategy.step(loss * (100 if step in OUTLIERS else 1), optimizer).skipped:
                skipped.append(step)
        checkpoint.save()
        return skipped, feature.skipped, len(feature.norms)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after the resume"])
@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=HOROVOD), "fsdp"])
def test_the_feature_of_the_page_skips_alike_on_all_ranks_and_goes_on_after_a_resume(
    backend: str, late: bool, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    for result in run_ranks(train, folder, backend, 0, 8, False):
        assert result == ([6], 1, WINDOW)
    for result in run_ranks(train, folder, backend, 8, STEPS, late):
        assert result == ([10], 2, WINDOW)


def with_statistics() -> Any:
    """Return a model with a BatchNorm layer that has seen data."""
    model: Any = nn.Sequential(*list(model_of()[:1]), nn.BatchNorm1d(8), *list(model_of()[1:])).double()
    nn.init.normal_(model[1].running_mean)
    return model


def norms_by_layer(gradients: dict[str, Tensor]) -> dict[str, float]:
    layers: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        layers.setdefault(name.partition(".")[0], []).append(gradient.reshape(-1))
    return {layer: float(torch.cat(parts).norm()) for layer, parts in layers.items()}


CLIP_NORM = 0.05  # each step is clipped


@pytest.mark.parametrize(
    ("backend", "synchronised"),
    [
        ("ddp", False),
        ("ddp", True),
        pytest.param("horovod", True, marks=HOROVOD),
        pytest.param("fsdp", False, marks=FSDP),
    ],
)
@on_ranks()
def test_the_other_features_of_the_page_see_and_do_the_same_as_in_a_plain_loop(
    backend: str, synchronised: bool
) -> None:
    settings: dict[str, Any] = {"backend": backend, "sync_batchnorm": synchronised, "clip_norm": CLIP_NORM}
    seen: list[tuple[int, dict[str, Tensor]]] = []
    measured: list[tuple[int, dict[str, float]]] = []
    with unitrain.init(precision="fp64", device="cpu", timeout_s=30, **settings) as strategy:

        def halve(step: int, gradients: dict[str, Tensor]) -> None:
            seen.append((step, {name: strategy.full_tensor(gradient.clone()) for name, gradient in gradients.items()}))
            for gradient in gradients.values():
                gradient.mul_(0.5)

        strategy.add(of_page("FrozenStatistics")())
        model = with_statistics()
        model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
        norms = strategy.add(of_page("LayerNorms")(strategy, model, every=2))
        strategy.add(of_page("OnGradients")(strategy, model, halve))
        train = strategy.dataloader(data(), global_batch_size=5)
        for _ in train.epochs(2):
            model.train()
            for inputs, targets in train:
                strategy.step(F.mse_loss(model(inputs), targets), optimizer)
                if norms.step == strategy.global_step:
                    measured.append((norms.step, norms.by_layer()))
            with strategy.evaluation(model):
                model(inputs)
        trained: Any = strategy.export(model)
        assert all(layer.train() is layer for layer in trained.modules())

    plain = with_statistics()
    for step in range(10):
        rows = slice(step % 5 * 5, step % 5 * 5 + 5)
        inputs, targets = (tensor[rows] for tensor in data().tensors)
        plain[1].eval()
        plain.zero_grad()
        F.mse_loss(plain(inputs), targets).backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
        torch.testing.assert_close(seen[step], (step + 1, gradients), rtol=0, atol=1e-9)
        if step % 2:
            torch.testing.assert_close(measured[step // 2], (step + 1, norms_by_layer(gradients)), rtol=0, atol=1e-9)
        for p in plain.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP_NORM)
        SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(dict(trained.state_dict()), dict(plain.state_dict()), rtol=0, atol=1e-9)
    assert torch.equal(trained[1].running_mean, with_statistics()[1].running_mean)


class Recorder(unitrain.Feature):
    """Records at which moments it is called."""

    def __init__(self, name: str, calls: list[str], place: int = 50) -> None:
        self.name, self.calls, self.place = name, calls, place

    def before_update(self, optimizer: Optimizer, parameters: Any) -> None:
        self.calls.append(self.name)


def test_hooks_are_called_in_the_order_of_their_places_and_then_as_they_were_added() -> None:
    calls: list[str] = []
    with strategy_of() as strategy:
        for name, place in (("late", 90), ("first", 50), ("second", 50), ("early", 1)):
            strategy.add(Recorder(name, calls, place))
        model, optimizer = strategy.prepare(model := model_of(), sgd(model))
        strategy.step(model(torch.ones(2, 4, dtype=torch.float64)).sum(), optimizer)
    assert calls == ["early", "first", "second", "late"]


def test_what_is_no_feature_or_is_there_already_is_refused() -> None:
    with strategy_of() as strategy:
        strategy.add(Recorder("mine", []))
        with pytest.raises(UsageError, match="there is a feature 'mine' already: give each a name of its own"):
            strategy.add(Recorder("mine", []))
        with pytest.raises(UsageError, match=r"add\(\) takes a unitrain.Feature, not int: make it a subclass"):
            strategy.add(3)  # type: ignore[type-var]


class Watcher(unitrain.Feature):
    """Records the optimizers and parameters of which it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def registered(self, optimizer: Optimizer) -> None:
        self.told.append(optimizer)

    def watched(self, optimizer: Optimizer, trained: Any) -> None:
        self.told.append(len(trained))


def test_a_late_feature_is_told_of_the_optimizers_so_far() -> None:
    with strategy_of() as strategy:
        model, optimizer = strategy.prepare(model := model_of(), sgd(model))
        assert strategy.add(Watcher()).told == [optimizer]
        strategy.step(model(torch.ones(2, 4, dtype=torch.float64)).sum(), optimizer)
        assert strategy.add(Watcher()).told == [optimizer, len(list(model.parameters()))]


class OtherAveraging(unitrain.Feature):
    """Would average gradients in another way."""

    def plug_in(self, sockets: Any) -> None:
        sockets.averaging = Averaging()


def test_averaging_can_not_be_replaced_in_a_run() -> None:
    refused = pytest.raises(UsageError, match=r"OtherAveraging averages gradients in another way, .* built already")
    with strategy_of() as strategy, refused:
        strategy.add(OtherAveraging())


class Failing(unitrain.Feature):
    """Fails before a step, and notices it."""

    failed = False

    def before_update(self, optimizer: Optimizer, parameters: Any) -> None:
        raise ValueError("mine")

    def after_error(self, optimizer: Optimizer) -> None:
        self.failed = True


def test_hooks_are_told_of_an_error_and_of_the_end() -> None:
    with strategy_of() as strategy:
        feature = strategy.add(Failing())
        model, optimizer = strategy.prepare(model := model_of(), sgd(model))
        with pytest.raises(ValueError, match="mine"):
            strategy.step(model(torch.ones(2, 4, dtype=torch.float64)).sum(), optimizer)
        assert feature.failed
