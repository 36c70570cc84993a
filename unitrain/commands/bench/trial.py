"""Runs a recipe unchanged, in one process of a measured world, and records when its optimizer steps end.

``python -m unitrain.commands.bench.trial FOLDER STEPS RECIPE [FLAG ...]``, started by any launcher. When the process
exits, the records are in ``FOLDER/rankN.json``.
"""

from __future__ import annotations

import atexit
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import unitrain
from unitrain.metrics.throughput import Totals


def main(folder: Path, steps: int, recipe: str, flags: Sequence[str]) -> None:
    """Run the recipe like ``python RECIPE FLAG ...``, and end it after a number of steps."""
    init = unitrain.init

    def recorded(*arguments: Any, **settings: Any) -> unitrain.Strategy:
        strategy = init(*arguments, **settings)
        record(strategy, folder, steps)
        return strategy

    unitrain.init = recorded
    sys.argv = [recipe, *flags]
    sys.path[0] = str(Path(recipe).parent)
    runpy.run_path(recipe, run_name="__main__")


def record(strategy: Any, folder: Path, steps: int) -> None:
    """Record the throughput at the end of each optimizer step of a strategy."""
    throughput = strategy.throughput()
    rows: list[Totals] = []

    def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **keywords: Any) -> Any:
            before = strategy.global_step
            result = call(*arguments, **keywords)
            if strategy.global_step != before:
                rows.append(throughput.totals())
                if len(rows) == steps:
                    strategy.close()
                    raise SystemExit(0)
            return result

        return called

    def write() -> None:
        record = {"settings": strategy.config.model_dump(mode="json"), "steps": rows}
        (folder / f"rank{strategy.rank}.json").write_text(json.dumps(record), encoding="utf-8")

    strategy.step, strategy.update = recorded(strategy.step), recorded(strategy.update)
    atexit.register(write)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
