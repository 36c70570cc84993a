"""What one process of a measured run writes down: when its steps ended, those without communication too."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from unitrain.errors import ConfigError
from unitrain.metrics.throughput import Totals
from unitrain.strategy import Strategy
from unitrain.training.step import StepResult


class Recording:
    """Takes note of each optimizer step of a strategy, and ends the run after enough of them.

    The last steps do not average gradients. What the others take longer than these is what communication costs, on
    any engine, wherever it hides it; the weights are thrown away.

    Args:
        strategy: as ``unitrain.init`` returned it.
        folder: where ``rankN.json`` goes when the process ends.
        steps: optimizer steps to take note of.
        alone: how many more to take without communication.
    """

    def __init__(self, strategy: Strategy, folder: Path, steps: int, alone: int) -> None:
        self._strategy = strategy
        self._folder = folder
        self._steps = steps
        self._alone = alone if _may_run_alone(strategy) else 0
        self._muted = False
        self._throughput = strategy.throughput()
        self._rows: list[Totals] = []
        self._seen = strategy.steps
        self._update, self._all_reduce = strategy._training_step.update, strategy._all_reduce
        strategy._training_step.update = self._recorded  # type: ignore[method-assign]
        strategy._all_reduce = self._all_reduce_unless_muted  # type: ignore[method-assign]
        atexit.register(self._write)

    def _recorded(self, *arguments: Any, **keywords: Any) -> StepResult:
        result = self._update(*arguments, **keywords)
        if self._strategy.steps != self._seen:
            self._seen = self._strategy.steps
            self._rows.append(self._throughput.totals())
            if len(self._rows) == self._steps + self._alone:
                self._strategy.close()
                raise SystemExit(0)
            if len(self._rows) == self._steps:
                self._mute()
        return result

    def _mute(self) -> None:
        self._muted = True
        self._strategy._arm(False)
        self._strategy._arm = _ignore  # type: ignore[method-assign]

    def _all_reduce_unless_muted(self, tensor: Tensor, op: str, name: str) -> Callable[[], None]:
        if self._muted and name.startswith("gradients"):
            return _nothing_to_wait_for
        return self._all_reduce(tensor, op, name)

    def _write(self) -> None:
        record = {
            "settings": self._strategy.config.model_dump(mode="json"),
            "steps": self._rows[: self._steps],
            "alone": self._rows[self._steps - 1 :],  # from the end of the last step that is none of them
        }
        (self._folder / f"rank{self._strategy.rank}.json").write_text(json.dumps(record), encoding="utf-8")


def _may_run_alone(strategy: Strategy) -> bool:
    """Whether the ranks can take steps without averaging their gradients."""
    if strategy.world_size == 1 or strategy.config.check_in_sync_every:  # ranks that are compared must not drift apart
        return False
    try:  # a backend that must reduce in each backward refuses accumulation
        type(strategy).check(strategy.config.model_copy(update={"accumulate": 2}), strategy.launch)
    except ConfigError:
        return False
    return True


def _ignore(sync: bool) -> None:
    """Stand in for a strategy's ``_arm``."""


def _nothing_to_wait_for() -> None:
    """Stand in for the wait of a reduction that was never begun."""
