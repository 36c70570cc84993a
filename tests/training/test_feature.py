"""Features of a script: its hooks, verdicts and state, as the page on features has them, on any backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from page_blocks import blocks
from places import ROOT
from plain_loop import model_of, sgd, strategy_of
from ranks import run_ranks
from torch.optim import Optimizer

import unitrain
from unitrain import UsageError
from unitrain.training.loop.averaging import Averaging

STEPS = 12
OUTLIERS = {6, 10}
WINDOW = 4


def skip_outliers() -> Any:
    """Return the class that the page defines, whose window is short here."""
    [block] = [block for block in blocks(ROOT / "docs" / "guide" / "features.md") if "class SkipOutliers" in block.text]
    names: dict[str, Any] = {"unitrain": unitrain}
    exec(block.text.partition("skips = ")[0], names)
    return names["SkipOutliers"]


def train(folder: str, backend: str, first: int, last: int, late: bool) -> tuple[list[int], int, int]:
    """Return which steps were skipped, how many the feature counts, and how many norms it has, after these steps."""
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=30) as strategy:
        model, optimizer = strategy.prepare(model := model_of(), sgd(model))
        feature = skip_outliers()(window=WINDOW)
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
