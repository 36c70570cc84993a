"""Runs a recipe unchanged, in one process of a measured world, and records when its optimizer steps end.

``python -m unitrain.commands.bench.trial FOLDER STEPS RECIPE [FLAG ...]``, started by any launcher. When the process
exits, the records are in ``FOLDER/rankN.json``.
"""

from __future__ import annotations

import atexit
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import unitrain
from unitrain.metrics.throughput import Totals
from unitrain.training.hooks import StepHook


def main(folder: Path, steps: int, recipe: str, flags: Sequence[str]) -> None:
    """Run the recipe like ``python RECIPE FLAG ...``, and end it after a number of steps."""
    init = unitrain.init

    def recorded(*arguments: Any, **settings: Any) -> unitrain.Strategy:
        strategy = init(*arguments, **settings)
        Recorder(strategy, folder, steps)
        return strategy

    unitrain.init = recorded
    sys.argv = [recipe, *flags]
    sys.path[0] = str(Path(recipe).parent)
    runpy.run_path(recipe, run_name="__main__")


class Recorder(StepHook):
    """Records the throughput at the end of each optimizer step of a strategy, and ends the run after a number of them.

    Args:
        strategy: the strategy.
        folder: folder of ``rankN.json``, which is written when the process exits.
        steps: number of optimizer steps.
    """

    def __init__(self, strategy: unitrain.Strategy, folder: Path, steps: int) -> None:
        self._strategy = strategy
        self._file = folder / f"rank{strategy.rank}.json"
        self._steps = steps
        self._throughput = strategy.throughput()
        self._seen = strategy.global_step
        self._rows: list[Totals] = []
        strategy._step.hooks.add_hook(self)
        atexit.register(self._write)

    def after_call(self) -> None:
        """Record the step, if one was made."""
        if self._strategy.global_step == self._seen:
            return
        self._seen = self._strategy.global_step
        self._rows.append(self._throughput.totals())
        if len(self._rows) == self._steps:
            self._strategy.close()
            raise SystemExit(0)

    def _write(self) -> None:
        record = {"settings": self._strategy.config.model_dump(mode="json"), "steps": self._rows}
        self._file.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
