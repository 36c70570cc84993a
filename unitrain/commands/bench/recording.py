"""What one process of a measured run writes down: when its steps ended, those without communication too."""

from __future__ import annotations

import atexit
import json
from pathlib import Path

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
        # A static graph must be reduced in each step, and ranks that are compared must not drift apart.
        config = strategy.config
        runs_alone = strategy.world_size > 1 and not (config.ddp.static_graph or config.check_in_sync_every)
        self._alone = alone if runs_alone else 0
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
