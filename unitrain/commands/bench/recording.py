"""What one process of a measured run writes down: when its steps ended, those without communication too."""

from __future__ import annotations

import atexit
import json
from pathlib import Path

from unitrain.backend import load_backend
from unitrain.errors import ConfigError
from unitrain.metrics.throughput import Totals
from unitrain.strategy import Strategy


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
        self._throughput = strategy.throughput()
        self._rows: list[Totals] = []
        self._seen = strategy.global_step
        strategy.training_step.observe(self)
        atexit.register(self._write)

    def began(self) -> None:
        """``backward`` or ``update`` was called."""

    def ended(self) -> None:
        """It has ended: take note of a step that was made, and end the run after enough of them."""
        if self._strategy.global_step == self._seen:
            return
        self._seen = self._strategy.global_step
        self._rows.append(self._throughput.totals())
        if len(self._rows) == self._steps + self._alone:
            self._strategy.close()
            raise SystemExit(0)
        if len(self._rows) == self._steps:
            self._strategy.training_step.stop_averaging()

    def _write(self) -> None:
        record = {
            "settings": self._strategy.config.model_dump(mode="json"),
            "steps": self._rows[: self._steps],
            "alone": self._rows[self._steps - 1 :],  # from the end of the last step that is none of them
        }
        (self._folder / f"rank{self._strategy.rank}.json").write_text(json.dumps(record), encoding="utf-8")


def _may_run_alone(strategy: Strategy) -> bool:
    """Whether the ranks can take steps without averaging their gradients."""
    config = strategy.config
    if strategy.world_size == 1 or config.check_in_sync_every:  # ranks that are compared must not drift apart
        return False
    try:  # a backend that must reduce in each backward refuses accumulation
        load_backend(config.backend).check(config.model_copy(update={"accumulate": 2}), strategy.launch)
    except ConfigError:
        return False
    return True
