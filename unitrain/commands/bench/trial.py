"""Runs a recipe unchanged, in one process of a measured world, and records its steps.

``python -m unitrain.commands.bench.trial FOLDER STEPS ALONE RECIPE [FLAG ...]``, started by any launcher.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import unitrain
from unitrain import initialize
from unitrain.commands.bench.recording import Recording
from unitrain.commands.bench.silence import silenced
from unitrain.communication.backend import load_backend


def main(folder: Path, steps: int, alone: int, recipe: str, flags: Sequence[str]) -> None:
    """Run the recipe like ``python RECIPE FLAG ...``. See ``Recording`` for the other arguments."""
    init = unitrain.init

    def recorded(*arguments: Any, **settings: Any) -> unitrain.Strategy:
        strategy = init(*arguments, **settings)
        Recording(strategy, folder, steps, alone)
        return strategy

    unitrain.init = recorded
    vars(initialize)["load_backend"] = lambda name: silenced(load_backend(name))
    sys.argv = [recipe, *flags]
    sys.path[0] = str(Path(recipe).parent)
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
