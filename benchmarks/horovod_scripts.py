"""A step of Horovod's ``DistributedOptimizer``, and of UniTrain's under the same name, on two processes.

    python benchmarks/horovod_scripts.py

What is timed is a whole step with the gradients of ResNet-18 and of ResNet-50: forward and backward (as cheap as
possible: each gradient costs one write), averaging, SGD. Both libraries are in the same processes and take turns:
Horovod on gloo or on MPI, and ``unitrain.compat.horovod`` on torch.distributed with gloo, which is what
``unitrain horovod SCRIPT`` uses, or on the same Horovod, which it uses with ``UNITRAIN_BACKEND=horovod``. Horovod's
takes part twice, which shows the spread. Weights must be equal bit for bit.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loops import by_hand
from shared import workloads
from shared.processes import HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, ratios, run
from shared.rounds import Way, alternate, compared, repeat
from shared.workloads import OnlyParameters, Shape, bit_equal

WORLDS = (HOROVOD_GLOO, HOROVOD_MPI)
BACKENDS = {"ddp": "gloo", "horovod": "Horovod"}
MODELS = {"resnet18_shapes": "ResNet-18, 62 tensors, 47 MB", "resnet50_shapes": "ResNet-50, 161 tensors, 102 MB"}
BASE, CONTROL, OURS = "Horovod", "Horovod, again", "UniTrain"
LENGTH, SHORT = (15, 2), (2, 1)  # rounds, and steps per round
SHORT_ELEMENTS = 2**14  # maximum number of elements of a tensor


def stepping(hvd: Any, shapes: list[Shape]) -> tuple[OnlyParameters, Way]:
    """Return a model and its step, as Horovod's scripts have it."""
    scale = torch.tensor(float(hvd.rank() + 1))
    model = OnlyParameters(shapes)
    made: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(made, named_parameters=model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss: Tensor = model(scale)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return model, step


def measure_world(model: str, backend: str, rounds: int, steps: int, most: int | None) -> Found | None:
    """Measure each library in this process's world, UniTrain on a backend; tensors have at most ``most`` elements."""
    shapes: list[Shape] = getattr(workloads, model)()
    if most is not None:
        shapes = [(min(most, torch.Size(shape).numel()),) for shape in shapes]
    os.environ |= {"UNITRAIN_BACKEND": backend, "UNITRAIN_DEVICE": "cpu"}
    theirs, ours = by_hand.horovod(), by_hand.compatible()
    theirs.init()
    ours.init()
    torch.set_num_threads(1)
    made = {BASE: stepping(theirs, shapes), CONTROL: stepping(theirs, shapes), OURS: stepping(ours, shapes)}
    ways = {name: partial(repeat, step, steps) for name, (_, step) in made.items()}
    found: Found = compared(alternate(ways, rounds, before=theirs.barrier), BASE, steps)
    for name, (trained, _) in made.items():
        found[name]["weights_bit_equal"] = bit_equal(trained, made[BASE][0])
    main = ours.rank() == 0
    ours.shutdown()
    theirs.shutdown()
    return found if main else None


def measure(short: bool) -> Found:
    rounds, steps = SHORT if short else LENGTH
    how: dict[str, Any] = {"rounds": rounds, "steps": steps, "most": SHORT_ELEMENTS if short else None}
    cases = [(model, backend) for model in MODELS for backend in BACKENDS]
    worlds = startable(*((HOROVOD_GLOO,) if short else WORLDS))
    return {
        "cases": [
            {
                "world": world,
                "model": model,
                "backend": backend,
                "ways": in_processes(world, measure_world, model=model, backend=backend, **how),
            }
            for world in worlds
            for model, backend in cases
        ]
    }


def tables(found: Found) -> str:
    rows = [
        (f"{world_name(case['world'])}, {MODELS[case['model']]}, UniTrain on {BACKENDS[case['backend']]}", case["ways"])
        for case in found["cases"]
    ]
    return ratios("Horovod's world, gradients", rows, BASE, CONTROL)


if __name__ == "__main__":
    run(measure, tables)
