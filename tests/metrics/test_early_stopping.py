"""All ranks stop at the same update, by rank 0's metric, and a resumed run decides as one that was not interrupted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from plain_loop import data, model_of, sgd, strategy_of
from ranks import run_ranks
from torch.nn.functional import mse_loss

import unitrain
from unitrain import CheckpointError, Strategy, UsageError


@pytest.fixture
def strategy() -> Iterator[Strategy]:
    with strategy_of() as strategy:
        yield strategy


@pytest.mark.parametrize(
    ("options", "values", "improved", "best"),
    [
        ({"mode": "max"}, [1, 2, 2, 1.5], [True, True, False, False], 2),
        ({"mode": "min"}, [1, 2, 0.5, 0.5], [True, False, True, False], 0.5),
        ({"mode": "max", "min_delta": 1}, [1, 2, 2.5, 3], [True, False, True, False], 2.5),
        ({"mode": "min", "min_delta": 1}, [1, 0, -0.5], [True, False, True], -0.5),
        ({"mode": "max"}, [math.nan, -math.inf, math.nan, 1], [False, True, False, True], 1),
        ({"mode": "min"}, [math.nan, math.inf, math.nan, 1], [False, True, False, True], 1),
        ({"mode": "max"}, [torch.tensor(3), torch.tensor([4.0])], [True, True], 4),
    ],
)
def test_what_an_improvement_is(
    strategy: Strategy, options: dict[str, Any], values: list[Any], improved: list[bool], best: float
) -> None:
    stopping = strategy.early_stopping(**options)
    assert stopping.best is None
    assert [stopping.update(value) for value in values] == improved
    assert stopping.best == best
    assert not stopping.should_stop


def test_it_stops_after_patience_updates_in_a_row(strategy: Strategy) -> None:
    stopping = strategy.early_stopping(patience=2)
    stops = []
    for value in (1, 0, 2, math.nan, 1, 3):
        stopping.update(value)
        stops.append(stopping.should_stop)
    assert stops == [False, False, False, False, True, False]
    never = strategy.early_stopping(patience=3)
    assert [(never.update(math.nan), never.should_stop) for _ in range(3)][-1] == (False, True)


def decide() -> list[Any]:
    """Update with values that differ between ranks, and with none; return what this rank decides."""
    with unitrain.init(backend="ddp", device="cpu", timeout_s=30) as strategy:
        stopping = strategy.early_stopping(patience=2)
        seen: list[Any] = []
        for value in (1.0, 0.5, 0.2, 2.0):
            seen.append(stopping.update(value if strategy.is_main else None))
            seen.append(stopping.update(math.nan if strategy.is_main else 10 * value))
            seen.append(stopping.should_stop)
        try:
            stopping.update(torch.ones(2) if strategy.is_main else 1.0)
        except UsageError as error:
            seen.append(str(error))
        return [*seen, stopping.best]


def test_rank_0_decides() -> None:
    said = "early_stopping: update() takes a number, not a tensor of shape (2,): pass meter.value(), say."
    decided = [True, False, False, False, False, True, False, False, True, True, False, False, said, 2.0]
    assert run_ranks(decide, nprocs=2) == [decided] * 2


def test_the_documented_example_stops_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = (ROOT / "docs" / "guide" / "training.md").read_text().split("## Early stopping")[1]
    [example] = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    metric = [1.0, 2.0, math.nan, 0.0, 1.0, 2.0, 1.0, 0.0]
    ended_at = []
    for epochs in (4, 90, 90):
        with strategy_of() as strategy:
            model, optimizer = strategy.prepare(module := model_of(), sgd(module))
            train = strategy.dataloader(data(), global_batch_size=11)
            names: dict[str, Any] = {
                "strategy": strategy, "model": model, "optimizer": optimizer, "criterion": mse_loss, "train": train,
                "evaluate": lambda model, train=train: metric[train.epoch - 1],
            }  # fmt: skip
            exec(compile(example.replace("epochs(90)", f"epochs({epochs})"), "training.md", "exec"), names)
            ended_at.append((strategy.global_step, names["stopping"].best))
    # Two steps an epoch: 4 epochs; continued until 5 epochs brought no improvement; and not trained any more.
    assert ended_at == [(8, 2.0), (14, 2.0), (14, 2.0)]


def test_what_makes_no_sense_is_refused(strategy: Strategy) -> None:
    for options, said in [
        ({"mode": "up"}, "mode is 'up', but must be 'min' or 'max'"),
        ({"patience": 0}, "patience is 0, but must be at least 1"),
        ({"min_delta": -1.0}, r"min_delta is -1\.0, but must be at least 0"),
        ({"min_delta": math.nan}, "min_delta is nan"),
    ]:
        with pytest.raises(UsageError, match=said):
            strategy.early_stopping(**options)  # type: ignore[arg-type]
    for value in ("0.5", None, 1j, torch.tensor(1j)):
        with pytest.raises(UsageError, match="takes a number, not a"):
            strategy.early_stopping().update(value)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="of a metric with mode 'min', and this run has 'max'"):
        strategy.early_stopping("max").load_state_dict(strategy.early_stopping("min").state_dict())
