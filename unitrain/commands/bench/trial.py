"""Runs a recipe unchanged, in one process of a measured world, and ends it after a number of optimizer steps.

``python -m unitrain.commands.bench.trial FILE STEPS RECIPE [FLAG ...]``, started by any launcher. Rank 0 writes the
backend and the throughput of the second and of the last third of the steps to ``FILE``.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import unitrain
from unitrain.training.hooks import StepHook


class Recorder(StepHook):
    """Reads the throughput of a strategy after each third of a number of optimizer steps, and ends the run."""

    def __init__(self, strategy: unitrain.Strategy, file: Path, steps: int) -> None:
        self._strategy = strategy
        self._file = file
        self._throughput = strategy.throughput()
        self._ends = [strategy.global_step + third * steps // 3 for third in (1, 2, 3)]
        self._thirds: list[dict[str, float]] = []
        strategy._step.hooks.add_hook(self)

    def after_call(self) -> None:
        """Read the throughput if a third has ended."""
        if self._strategy.global_step < self._ends[0]:
            return
        del self._ends[0]
        self._thirds.append(self._throughput.read())
        if not self._ends:
            if self._strategy.is_main:
                record = {"backend": self._strategy.config.backend, "thirds": self._thirds[1:]}
                self._file.write_text(json.dumps(record), encoding="utf-8")
            self._strategy.close()
            raise SystemExit(0)


def main(file: Path, steps: int, recipe: str, *flags: str) -> None:
    """Run the recipe like ``python RECIPE FLAG ...``, with a recorder on its strategy."""
    init = unitrain.init

    def recorded(*arguments: Any, **settings: Any) -> unitrain.Strategy:
        strategy = init(*arguments, **settings)
        Recorder(strategy, file, steps)
        return strategy

    unitrain.init = recorded
    sys.argv = [recipe, *flags]
    sys.path[0] = str(Path(recipe).parent)
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
