"""Draw a metric of some runs by epoch into a PNG, from their ``metrics.jsonl``.

python -m unitrain.recipes.curves val_perplexity curve.png runs/a runs/b --baseline bigram=13.87
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from unitrain import ConfigError
from unitrain.job.excepthook import install_hook


_STYLES = ("-", "--", ":", "-.")  # curves of runs that trained alike lie on each other


def draw(metric: str, output: Path, folders: Sequence[Path], baselines: Sequence[tuple[str, float]] = ()) -> None:
    """Draw a metric of each run, and baselines as dashed lines.

    Args:
        metric: the name of the metric in ``metrics.jsonl``.
        output: the PNG file.
        folders: the runs' folders.
        baselines: names and values.

    Raises:
        ConfigError: a folder has no metrics, or not this one.
    """
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for number, folder in enumerate(folders):
        file = folder / "metrics.jsonl"
        try:
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            points = [(line["epoch"] + 1, line[metric]) for line in lines]
        except OSError as error:
            raise ConfigError(f"{folder} is not the folder of a run: {error}.") from None
        except KeyError:
            raise ConfigError(f"{file} has no metric {metric!r}, but {', '.join(lines[0])}.") from None
        last = lines[-1]
        label = f"{last['launcher']}, {last['backend']}, {last['world_size']}" if "launcher" in last else folder.name
        axes.plot(*zip(*points, strict=True), linestyle=_STYLES[number % len(_STYLES)], label=label)
    for name, value in baselines:
        axes.axhline(value, color="grey", linestyle="--", linewidth=1)
        axes.annotate(f"{name}: {value:g} ", (1, value), xycoords=("axes fraction", "data"), ha="right", va="top")
    axes.set(xlabel="epoch", ylabel=metric)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=80)


def _baseline(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    return name, float(value)


def main() -> None:
    """Draw what the command line says."""
    install_hook()
    parser = argparse.ArgumentParser(prog="curves.py", description="Draw a metric of some runs by epoch into a PNG.")
    parser.add_argument("metric", help="name of the metric in metrics.jsonl")
    parser.add_argument("output", type=Path, help="the PNG file")
    parser.add_argument("folders", type=Path, nargs="+", help="folders of the runs")
    parser.add_argument("--baseline", type=_baseline, action="append", default=[], help="NAME=VALUE: a dashed line")
    given = parser.parse_args(sys.argv[1:])
    draw(given.metric, given.output, given.folders, given.baseline)


if __name__ == "__main__":
    main()
