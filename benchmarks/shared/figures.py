"""Draws the bar charts of the pages from benchmarks/results/*.json into docs/figures/.

    python benchmarks/shared/figures.py
    python benchmarks/shared/figures.py --output /tmp/figures

Text is grey and the background transparent, so a chart is readable on a light and on a dark page.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "figures"
GREY, OTHERS, OURS, LIGHT = "#787878", "#9aa5b1", "#3f7fbf", "#9cc3e6"
Results = Mapping[str, Any]
# A bar for each series of a row, in the order of the chart from top to bottom.
Rows = Mapping[str, Mapping[str, float]]
WORLDS = {"torchrun": "DDP, gloo", "mpirun": "Horovod, MPI", "horovodrun": "Horovod, gloo"}


def bars(axis: Axes, title: str, rows: Rows, colors: Mapping[str, str], shown: str = "{:,.0f}") -> None:
    """Draw horizontal bars with their values.

    Args:
        axis: where to draw.
        title: what the bars show, with the unit.
        rows: the values of each row, by series.
        colors: the color of each series; a row's name takes precedence.
        shown: the format of a value.
    """
    series = list(dict.fromkeys(name for values in rows.values() for name in values))
    height = 0.8 / len(series)
    for place, (row, values) in enumerate(rows.items()):
        for number, (name, value) in enumerate(values.items()):
            top = place + (number - (len(values) - 1) / 2) * height
            [bar] = axis.barh(top, value, 0.9 * height, color=colors.get(row, colors[name]))
            axis.bar_label(axis.containers[-1], [shown.format(value)], padding=3, fontsize=9)  # type: ignore[arg-type]
            if place == 0 and len(series) > 1:
                bar.set_label(name)
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_yticks(range(len(rows)), list(rows))
    axis.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    axis.set_xticks([])
    axis.set_xlim(0, 1.18 * max(value for values in rows.values() for value in values.values()))
    axis.tick_params(left=False)
    axis.spines[:].set_visible(False)


def step(results: Results, figure: Figure) -> None:
    """Draw the time of a step in one process, by hand and in each framework."""
    for axis, task, unit, factor in zip(
        figure.subplots(1, 2), ("mlp", "resnet18"), ("tiny MLP, µs", "ResNet-18, ms"), (1e6, 1e3), strict=True
    ):
        [case] = [
            case
            for case in results["cases"]
            if (case["task"], case["style"], case["world"][0]) == (task, "plain", "python")
        ]
        names = ("by hand", "UniTrain", "Fabric", "Ignite", "Accelerate")
        rows = {name: {"a step": case["loops"][name]["seconds"] * factor} for name in names}
        bars(axis, f"A step of a {unit}", rows, {"a step": OTHERS, "UniTrain": OURS})


def averaging(results: Results, figure: Figure) -> None:
    """Draw the time of a step that averages large gradients, by hand and with UniTrain."""
    models = {"resnet50_shapes": "ResNet-50's gradients (102 MB)", "transformer_shapes": "A transformer's (151 MB)"}
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (model, title) in zip(axes, models.items(), strict=True):
        rows = {
            WORLDS[case["world"][0]]: {name: case["ways"][name]["seconds"] * 1e3 for name in ("by hand", "UniTrain")}
            for case in results["cases"]
            if case["model"] == model
        }
        bars(axis, f"{title}, ms a step", rows, {"by hand": OTHERS, "UniTrain": OURS})
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)


def slow_links(results: Results, figure: Figure) -> None:
    """Draw the time of a step over slow links, by setting."""
    names = {
        "none": "every step, float32",
        "bf16": "compression: bf16",
        "powersgd": "compression: powersgd",
        "local SGD, 32 steps": "local SGD, 32 steps",
        "DiLoCo, 32 steps": "DiLoCo, 32 steps",
    }
    for axis, link in zip(figure.subplots(1, 2, sharey=True), ("1 Gbit/s", "100 Mbit/s"), strict=True):
        rows = {shown: {"a step": results["links"][link][name]["seconds"] * 1e3} for name, shown in names.items()}
        bars(axis, f"{link}, ms a step", rows, {"a step": OURS, "every step, float32": OTHERS})


def balanced_batches(results: Results, figure: Figure) -> None:
    """Draw how many times as fast an epoch is with balanced batches as with every W-th sample."""
    names = {
        "every W-th sample": "every W-th sample",
        "lengths": "lengths",
        "transformers, grouped by length": "transformers, grouped by length",
    }
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (task, worlds) in zip(axes, results["tasks"].items(), strict=True):
        rows = {
            shown: {f"{ranks} processes": 1 / ways[name]["ratio"] for ranks, ways in worlds.items()}
            for name, shown in names.items()
        }
        bars(axis, f"{task}: times as fast", rows, {"2 processes": LIGHT, "4 processes": OURS}, "{:.1f}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)


def checkpoints(results: Results, figure: Figure) -> None:
    """Draw for how long a save stops training, and after how long it is on the disk."""
    names = {
        "UniTrain, background=True": "UniTrain, in the background",
        "torch.distributed.checkpoint.async_save": "dcp.async_save",
        "UniTrain, background=False": "UniTrain, background=False",
        "torch.distributed.checkpoint.save": "dcp.save",
        "torch.save and fsync": "torch.save and fsync",
    }
    rows = {
        shown: {
            "training stops": results["stalls"][name]["seconds"] * 1e3,
            "until it is on the disk": results["totals"][name]["seconds"] * 1e3,
        }
        for name, shown in names.items()
    }
    axis = figure.subplots()
    bars(axis, "A checkpoint of 204 MB, ms", rows, {"training stops": OURS, "until it is on the disk": LIGHT})
    figure.legend(loc="outside lower center", ncols=2, frameon=False)


# The chart of each file, with the benchmark whose results it shows.
CHARTS: dict[str, tuple[str, Callable[[Results, Figure], None]]] = {
    "step": ("step_overhead", step),
    "averaging": ("averaging", averaging),
    "slow_links": ("averaging", slow_links),
    "balanced_batches": ("balanced_batches", balanced_batches),
    "checkpoints": ("checkpoints", checkpoints),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=PICTURES, help="folder of the charts (default: docs/figures)")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name, (benchmark, draw) in CHARTS.items():
        results = json.loads((RESULTS / f"{benchmark}.json").read_text())
        with mpl.rc_context(
            {
                "axes.facecolor": "none",
                "font.size": 10,
                "svg.fonttype": "none",  # text stays text
                "svg.hashsalt": "unitrain",  # the same file each time
                "text.color": GREY,
                "ytick.color": GREY,
            }
        ):
            figure = Figure(figsize=(9, 2.6), layout="constrained")
            draw(results, figure)
            picture = io.StringIO()
            figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})
            lines = (line.rstrip() for line in picture.getvalue().splitlines())
            (output / f"{name}.svg").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
