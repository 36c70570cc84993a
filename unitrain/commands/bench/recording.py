"""Records when the steps of one process end, with and without communication."""

from __future__ import annotations

import atexit
import json
from pathlib import Path

from unitrain.commands.bench.silence import silence
from unitrain.communication.backend import load_backend
from unitrain.errors import ConfigError
from unitrain.metrics.throughput import Totals
from unitrain.strategy import Strategy
from unitrain.training.hooks import StepHook


class Recording(StepHook):
    """Records each optimizer step of a strategy, and ends the run after a number of steps.

    The last steps do not average gradients. The difference in time is the cost of communication, with any library and
    any overlap. The weights are not used afterwards.

    Args:
        strategy: the strategy, whose backend's class is from ``silenced``.
        folder: folder of ``rankN.json``, which is written when the process exits.
        steps: number of optimizer steps to record.
        alone: number of further steps without communication.
    """

    def __init__(self, strategy: Strategy, folder: Path, steps: int, alone: int) -> None:
        self._strategy = strategy
        self._folder = folder
        self._steps = steps
        self._alone = alone if _may_run_alone(strategy) else 0
        self._throughput = strategy.throughput()
        self._rows: list[Totals] = []
        self._seen = strategy.global_step
        strategy.training_step.hooks.add_hook(self)
        atexit.register(self._write)

    def after_call(self) -> None:
        """Record the step if one was made, and end the run after the last."""
        if self._strategy.global_step == self._seen:
            return
        self._seen = self._strategy.global_step
        self._rows.append(self._throughput.totals())
        if len(self._rows) == self._steps + self._alone:
            self._strategy.close()
            raise SystemExit(0)
        if len(self._rows) == self._steps:
            silence()

    def _write(self) -> None:
        record = {
            "settings": self._strategy.config.model_dump(mode="json"),
            "steps": self._rows[: self._steps],
            "alone": self._rows[self._steps - 1 :],  # from the end of the last step with communication
        }
        (self._folder / f"rank{self._strategy.rank}.json").write_text(json.dumps(record), encoding="utf-8")


def _may_run_alone(strategy: Strategy) -> bool:
    """Return whether the ranks can make steps without averaging gradients."""
    config = strategy.config
    if strategy.world_size == 1 or config.check_in_sync_every:  # the check would find different weights
        return False
    try:  # a backend that must communicate in every backward refuses accumulation
        load_backend(config.backend).check(config.model_copy(update={"accumulate": 2}), strategy.launch)
    except ConfigError:
        return False
    return True
