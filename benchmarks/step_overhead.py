"""The overhead of a training step over a hand-written loop, with UniTrain and with other frameworks.

    python benchmarks/step_overhead.py

A tiny MLP and ResNet-18, plain and with accumulation, clipping and metrics, on one process and on two under each
launcher. All loops run in the same processes, in turns. On one process, CPU time of the calling thread is measured, so
that other work on the machine counts little. On several, it is wall-clock time, since waiting is part of the cost.

The hand-written loop takes part twice; the difference between its two copies is the spread of the run. It does less
than UniTrain: it does not check for NaN, and does not weight uneven batches. All loops do the same arithmetic, so final
weights must be equal bit for bit.

Accelerate and Lightning Fabric do not run on Horovod. Composer (mosaicml 0.32.1) is missing because it needs a torch
older than 2.7.1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import unitrain
from loops import ACCUMULATE, Loop, by_hand, ours
from shared import workloads
from shared.processes import ALONE, GLOO, HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.rounds import alternate, compared, shown_ratio, slower_beyond_spread
from shared.workloads import Task, bit_equal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORLDS = (ALONE, GLOO, HOROVOD_MPI, HOROVOD_GLOO)
STYLES = ("plain", "full")
BASE, CONTROL, OURS = "by hand", "by hand, again", "UniTrain"
# For each task, the rounds and the plain steps per round: on one process, and on two.
LENGTHS = {"mlp": ((21, 400), (15, 120)), "resnet18": ((7, 4), (9, 3))}
SHORT = (2, 2)
SHORT_CASES = ((GLOO, "full"), (HOROVOD_GLOO, "plain"))


def loops(task: Task, style: str, strategy: unitrain.Strategy) -> dict[str, Loop]:
    """Return the loops of the frameworks that run in this world."""
    hand: Callable[[Task, str], Loop] = getattr(by_hand, style)
    made = {BASE: hand(task, strategy.config.backend), CONTROL: hand(task, strategy.config.backend)}
    made[OURS] = getattr(ours, style)(task, strategy)
    from loops import ignite

    made["Ignite"] = getattr(ignite, style)(task)
    if strategy.config.backend != "horovod":
        from loops import accelerate, fabric

        made["Accelerate"] = getattr(accelerate, style)(task)
        made["Fabric"] = getattr(fabric, style)(task, strategy.world_size)
    return made


def measure_world(style: str, tasks: list[str], lengths: tuple[int, int] | None = None) -> Found | None:
    """Measure all loops of a style in this process's world. ``lengths`` are the rounds, and the steps per round."""
    settings: dict[str, Any] = ours.FULL_SETTINGS if style == "full" else {}
    found = {}
    for name in tasks:
        with unitrain.init(device="cpu", threads_per_process=1, **settings) as strategy:
            clock = time.thread_time if strategy.world_size == 1 else time.perf_counter
            rounds, steps = LENGTHS[name][strategy.world_size > 1] if lengths is None else lengths
            steps = max(1, steps // ACCUMULATE) if style == "full" else steps
            made = loops(getattr(workloads, name)(strategy.rank), style, strategy)
            ways = {label: partial(loop.run, steps) for label, loop in made.items()}
            seconds = alternate(ways, rounds, before=strategy.barrier, clock=clock)
            found[name] = compared(seconds, BASE, steps)
            for label, loop in made.items():
                found[name][label]["weights_bit_equal"] = bit_equal(made[BASE].model, loop.model)
    return found if strategy.is_main else None


def measure(short: bool) -> Found:
    every = [(world, style) for world in startable(*WORLDS) for style in STYLES]
    cases = []
    for world, style in [one for one in every if one in SHORT_CASES] if short else every:
        how = {"tasks": ["mlp"], "lengths": SHORT} if short else {"tasks": list(LENGTHS)}
        found = in_processes(world, measure_world, style=style, **how)
        cases += [{"world": world, "style": style, "task": task, "loops": its} for task, its in found.items()]
    return {"cases": cases}


def tables(found: Found) -> str:
    titles = {
        ("mlp", "plain"): "Tiny MLP (64-64-10, 32 rows), plain",
        ("mlp", "full"): "Tiny MLP, accumulation over 4, clipping, metrics",
        ("resnet18", "plain"): "ResNet-18 (8 images of 32 x 32), plain",
        ("resnet18", "full"): "ResNet-18, accumulation over 4, clipping, metrics",
    }
    parts = []
    for (task, style), title in titles.items():
        rows = []
        for case in found["cases"]:
            if (case["task"], case["style"]) == (task, style):
                rows += _rows(case)
        head = [
            "world",
            "loop",
            "µs a step",
            "over by hand, µs",
            "ratio (quartiles)",
            "slower",
            "weights",
        ]
        parts.append(f"**{title}**\n\n{table(head, rows)}")
    parts.append(
        "Accelerate and Lightning Fabric do not run on Horovod; Composer (mosaicml 0.32.1) can't be installed beside "
        "this torch. Slower: by more than the spread, that is, the lower "
        "quartile is above 1, and above the upper quartile of the loop by hand beside its own copy."
    )
    return "\n".join(parts)


def _rows(case: Found) -> list[list[str]]:
    its: dict[str, Found] = case["loops"]
    rows = []
    for label, one in its.items():
        slower = "" if label in (BASE, CONTROL) else "yes" if slower_beyond_spread(one, its[CONTROL]) else "no"
        rows.append(
            [
                world_name(case["world"]), label, f"{one['seconds'] * 1e6:,.1f}", f"{one['over_s'] * 1e6:+,.1f}",
                shown_ratio(one), slower, "bit-equal" if one["weights_bit_equal"] else "DIFFERENT",
            ]
        )  # fmt: skip
    return rows


def plot(found: Found, figure: Figure) -> None:
    figure.set_size_inches(14, 8)
    labels = [OURS, "Ignite", "Accelerate", "Fabric", CONTROL]
    panels = [(task, style) for task in LENGTHS for style in STYLES]
    for axis, (task, style) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        cases = [case for case in found["cases"] if (case["task"], case["style"]) == (task, style)]
        for i, label in enumerate(labels):
            for place, case in enumerate(cases):
                if label not in case["loops"]:
                    continue
                one = case["loops"][label]
                low, high = one["ratio_quartiles"]
                spread = [[max(0, one["ratio"] - low)], [max(0, high - one["ratio"])]]
                axis.bar(
                    place + 0.16 * (i - 2), one["ratio"], 0.15, yerr=spread, color=f"C{i}",
                    label=label if place == 0 else None,
                )  # fmt: skip
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(cases)), [world_name(case["world"]) for case in cases], fontsize=7)
        axis.set_ylabel("time of a step / by hand")
        axis.set_title(f"{task}, {style}")
    figure.axes[0].legend()


if __name__ == "__main__":
    run(measure, tables, plot)
