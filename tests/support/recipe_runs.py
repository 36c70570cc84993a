"""Runs a recipe in this process, and makes small data for recipes."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from tqdm import tqdm

# Of different lengths, so that the last sequences of the documents are, too.
DOCUMENTS = [f"Document {n}: " + "what is said here is said again, in other words. " * (15 + n) for n in range(6)]


def run_recipe(name: str, *flags: str, output: str | Path | None = "out") -> list[dict[str, Any]]:
    """Run a recipe's main, and return the metrics that it has written; none if it chooses its folder itself."""
    recipe = import_module(f"unitrain.recipes.{name}")
    argv = [f"{name}.py", *([f"--output-dir={output}"] if output else []), *flags]
    # tqdm's thread would stay for good.
    with mock.patch.object(sys, "argv", argv), mock.patch.object(tqdm, "monitor_interval", 0):
        recipe.main()
    return [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()] if output else []


def write_documents(folder: Path) -> None:
    """Write a folder of texts for the language model."""
    (folder / "more").mkdir(parents=True)
    for number, document in enumerate(DOCUMENTS):
        (folder / ("more" if number % 2 else "") / f"{number}.txt").write_text(document)
