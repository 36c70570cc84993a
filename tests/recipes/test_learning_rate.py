import math
from typing import Any

import pytest
import torch

from unitrain.errors import ConfigError
from unitrain.recipes.shared.learning_rate import LearningRate


def _rates(rule: LearningRate) -> list[float]:
    """The rates that an optimizer really gets, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rule.peak)
    scheduler = rule.scheduler(optimizer)
    rates = []
    for _ in range(rule.total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("rule", "rates"),
    [
        (LearningRate(0.4, 8, 4, "constant"), [0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4]),
        (LearningRate(1.0, 4, floor=0.2), [0.2 + 0.8 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]),
        (LearningRate(1.0, 6, schedule="step"), [1, 1, 0.1, 0.1, 0.01, 0.01]),
        (LearningRate(1.0, 6, schedule="step", floor=0.05), [1, 1, 0.1, 0.1, 0.05, 0.05]),
    ],
)
def test_rates_of_a_schedule(rule: LearningRate, rates: list[float]) -> None:
    assert _rates(rule) == pytest.approx(rates)


@pytest.mark.parametrize(("scaling", "peak"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_peak_scales_with_the_batch(scaling: Any, peak: float) -> None:
    rule = LearningRate(0.1, 10, scaling=scaling, batch_size=1024, reference_batch=256)
    assert rule.peak == pytest.approx(peak)
    assert rule.at(0) == pytest.approx(peak)


def test_the_rule_in_words() -> None:
    words = str(LearningRate(0.1, 900, 90, scaling="linear", batch_size=512, reference_batch=256))
    assert words == "0.1 * 512/256 = 0.2 (linear scaling), warm-up over 90 of 900 steps, then cosine to 0"
    assert (
        str(LearningRate(0.1, 9, schedule="constant")) == "0.1 (not scaled with the batch), no warm-up, then constant"
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"base": 0.0}, "0, 10, 256 and 256"),
        ({"total_steps": 0}, "0.1, 0, 256"),
        ({"warmup_steps": 11}, "11 steps"),
        ({"warmup_steps": -1}, "-1 steps"),
        ({"floor": 0.2}, "floor is 0.2"),
        ({"reference_batch": 0}, "256 and 0"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LearningRate(**{"base": 0.1, "total_steps": 10, **arguments})
