"""Averaging the gradients of ResNet-50 and of a 12-layer transformer: by hand and with UniTrain.

    python benchmarks/gradient_averaging.py

A whole step is timed: forward, backward, averaging, SGD. Forward and backward are as cheap as possible (each gradient
costs one write), so most of the time is that of averaging. The step without communication is measured too, and as a
lower bound one all-reduce of as many bytes by the communication library alone. By hand means DistributedDataParallel
with its default options, or ``hvd.DistributedOptimizer``. It takes part twice, which shows the spread. Weights must be
equal bit for bit.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from all_reduce import transport
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unitrain
from loops import by_hand
from shared import workloads
from shared.processes import GLOO, HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.rounds import Way, alternate, compared, repeat, shown_ratio, slower_beyond_spread
from shared.workloads import OnlyParameters, Shape, bit_equal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORLDS = (GLOO, HOROVOD_MPI, HOROVOD_GLOO)
MODELS = {"resnet50_shapes": "ResNet-50, 161 tensors, 102 MB", "transformer_shapes": "12-layer transformer, 151 MB"}
BASE, CONTROL, VIEWS, OURS = "by hand", "by hand, again", "by hand, gradients as bucket views", "UniTrain"
LOCAL, FLOOR = "step without communication", "one all-reduce by the transport"
LENGTH, SHORT = (11, 2), (2, 1)  # rounds, and steps per round
SHORT_ELEMENTS = 2**14  # maximum number of elements of a tensor


Made = tuple[nn.Module, Way]


def steps(strategy: unitrain.Strategy, shapes: list[Shape]) -> dict[str, Made]:
    """Return the model and the step of each way."""
    scale = torch.tensor(float(strategy.rank + 1))

    def make() -> tuple[nn.Module, Any]:
        model = OnlyParameters(shapes)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def step_by_hand(model: nn.Module, optimizer: Any) -> Way:
        def step() -> None:
            optimizer.zero_grad()
            loss: Tensor = model(scale)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    def hand(**options: Any) -> Made:
        model, optimizer = make()
        if strategy.config.backend == "ddp":
            model = DistributedDataParallel(model, **options)
        else:
            named = model.named_parameters()
            optimizer = by_hand.horovod().DistributedOptimizer(optimizer, named_parameters=named)
        return model, step_by_hand(model, optimizer)

    made: dict[str, Made] = {BASE: hand(), CONTROL: hand()}
    if strategy.config.backend == "ddp":
        made[VIEWS] = hand(gradient_as_bucket_view=True)
    model, optimizer = strategy.prepare(*make())
    made[OURS] = (model, lambda: strategy.step(model(scale), optimizer))
    alone, its_optimizer = make()
    made[LOCAL] = (alone, step_by_hand(alone, its_optimizer))
    return made


def measure_world(model: str, rounds: int, steps_: int, most: int | None, meeting: str) -> Found | None:
    """Measure each way in this process's world; tensors have at most ``most`` elements."""
    shapes: list[Shape] = getattr(workloads, model)()
    if most is not None:
        shapes = [(min(most, torch.Size(shape).numel()),) for shape in shapes]
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        made = steps(strategy, shapes)
        flat = torch.zeros(sum(torch.Size(shape).numel() for shape in shapes))
        reduce_alone = transport(strategy, meeting)
        once: dict[str, Way] = {name: step for name, (_, step) in made.items()}
        once[FLOOR] = lambda: reduce_alone(flat)
        ways: dict[str, Way] = {name: partial(repeat, way, steps_) for name, way in once.items()}
        found: Found = compared(alternate(ways, rounds, before=strategy.barrier), BASE, steps_)
        for name, (trained, _) in made.items():
            if name != LOCAL:
                found[name]["weights_bit_equal"] = bit_equal(made[BASE][0], trained)
        if strategy.launch.launcher == "horovodrun":
            torch.distributed.destroy_process_group()
        return found if strategy.is_main else None


def measure(short: bool) -> Found:
    rounds, steps_ = SHORT if short else LENGTH
    how: dict[str, Any] = {"rounds": rounds, "steps_": steps_, "most": SHORT_ELEMENTS if short else None}
    cases = []
    for model in list(MODELS)[:1] if short else MODELS:
        for world in startable(*((GLOO, HOROVOD_GLOO) if short else WORLDS)):
            with tempfile.TemporaryDirectory() as folder:
                ways = in_processes(world, measure_world, model=model, meeting=str(Path(folder, "meeting")), **how)
            cases.append({"model": model, "world": world, "ways": ways})
    return {"cases": cases}


def tables(found: Found) -> str:
    parts = []
    for model, title in MODELS.items():
        rows = []
        for case in found["cases"]:
            if case["model"] != model:
                continue
            ways = case["ways"]
            for name, one in ways.items():
                slower = "" if name != OURS else "yes" if slower_beyond_spread(one, ways[CONTROL]) else "no"
                weights = {True: "bit-equal", False: "DIFFERENT", None: ""}[one.get("weights_bit_equal")]
                milliseconds = f"{one['seconds'] * 1e3:.1f}"
                rows.append([world_name(case["world"]), name, milliseconds, shown_ratio(one), slower, weights])
        if rows:
            head = ["world", "way", "ms a step", "ratio (quartiles)", "slower", "weights"]
            parts.append(f"**{title}**\n\n{table(head, rows)}")
    return "\n".join(parts)


def plot(found: Found, figure: Figure) -> None:
    names = [BASE, CONTROL, VIEWS, OURS, LOCAL, FLOOR]
    models = list(dict.fromkeys(case["model"] for case in found["cases"]))
    figure.set_size_inches(12, 4.5)
    for axis, model in zip(figure.subplots(1, len(models), squeeze=False).flat, models, strict=True):
        cases = [case for case in found["cases"] if case["model"] == model]
        for i, name in enumerate(names):
            places = [place + 0.14 * (i - 2.5) for place, case in enumerate(cases) if name in case["ways"]]
            heights = [case["ways"][name]["seconds"] * 1e3 for case in cases if name in case["ways"]]
            axis.bar(places, heights, 0.13, label=name, color=f"C{i}")
        axis.set_xticks(range(len(cases)), [world_name(case["world"]) for case in cases], fontsize=7)
        axis.set_ylabel("ms a step")
        axis.set_title(MODELS[model])
    figure.axes[0].legend(fontsize=7)


if __name__ == "__main__":
    run(measure, tables, plot)
