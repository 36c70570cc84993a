"""A step with an optimizer that is sharded over two processes, and by hand with all of it on each.

    python benchmarks/sharded_optimizer.py

A whole step of a transformer's parameters is timed: forward and backward (as cheap as possible: each gradient costs one
write), averaging, the optimizer, and the exchange of what each rank has updated. AdamW reads and writes memory (12
layers); Muon multiplies matrices (those of two layers), of which each rank has a part. By hand means
DistributedDataParallel or ``hvd.DistributedOptimizer``, and takes part twice, which shows the spread. Under
torch.distributed, torch's ZeroRedundancyOptimizer takes part, too; Horovod has nothing like it. The bytes of the
optimizer's state on the rank that has the most of it are counted, and how far the weights are from those by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer

import unitrain
from loops import by_hand
from shared import workloads
from shared.processes import GLOO, HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.rounds import Way, alternate, compared, repeat, shown_ratio
from shared.workloads import OnlyParameters, Shape

WORLDS = (GLOO, HOROVOD_MPI, HOROVOD_GLOO)
BASE, CONTROL, TORCHS, OURS = "by hand", "by hand, again", "by hand, ZeroRedundancyOptimizer", "UniTrain"
LENGTH, SHORT = (11, 2), (2, 1)  # rounds, and steps per round
SHORT_WIDTH = 64  # maximum size of a tensor in each dimension
MUON_TENSORS = 24  # of two layers, with the vectors
MB = 2**20

Made = tuple[nn.Module, Optimizer, Way]


def steps(strategy: unitrain.Strategy, kind: Any, shapes: list[Shape]) -> dict[str, Made]:
    """Return the model, the optimizer and the step of each way, with one kind of optimizer."""
    scale = torch.tensor(float(strategy.rank + 1))

    def hand(make: Callable[..., Optimizer] = kind) -> Made:
        model: nn.Module = OnlyParameters(shapes)
        optimizer: Any = make(model.parameters(), lr=0.001)
        if strategy.config.backend == "ddp":
            model = DistributedDataParallel(model)
        else:
            optimizer = by_hand.horovod().DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

        def step() -> None:
            optimizer.zero_grad()
            loss: Tensor = model(scale)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return model, getattr(optimizer, "optim", optimizer), step

    made = {BASE: hand(), CONTROL: hand()}
    if strategy.config.backend == "ddp":
        made[TORCHS] = hand(partial(ZeroRedundancyOptimizer, optimizer_class=kind))
    model = OnlyParameters(shapes)
    prepared, optimizer = strategy.prepare(model, kind(model.parameters(), lr=0.001))
    made[OURS] = (model, optimizer, lambda: strategy.step(prepared(scale), optimizer))
    return made


def measure_world(rounds: int, steps_: int, most: int | None) -> Found | None:
    """Measure each way in this process's world; no dimension of a tensor is larger than ``most``."""
    shapes: list[Shape] = workloads.transformer_shapes()
    if most is not None:
        shapes = [tuple(min(most, size) for size in shape) for shape in shapes]
    matrices: list[Shape] = [shape for shape in shapes[:MUON_TENSORS] if len(shape) == 2]
    all_found: Found = {}
    with unitrain.init(device="cpu", shard_optimizer=True) as strategy:
        torch.set_num_threads(1)
        for name_of_kind, kind, its_shapes in (("AdamW", AdamW, shapes), ("Muon", Muon, matrices)):
            made = steps(strategy, kind, its_shapes)
            ways: dict[str, Way] = {name: partial(repeat, step, steps_) for name, (_, _, step) in made.items()}
            found: Found = compared(alternate(ways, rounds, before=strategy.barrier), BASE, steps_)
            for name, (trained, optimizer, _) in made.items():
                its = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
                found[name]["state_mb"] = float(strategy.all_reduce(torch.tensor(its / MB), "max"))
                pairs = zip(made[BASE][0].parameters(), trained.parameters(), strict=True)
                found[name]["largest_difference"] = max(float((a - b).detach().abs().max()) for a, b in pairs)
            all_found |= {f"{name_of_kind}, {name}": one for name, one in found.items()}
        return all_found if strategy.is_main else None


def measure(short: bool) -> Found:
    rounds, steps_ = SHORT if short else LENGTH
    how: dict[str, Any] = {"rounds": rounds, "steps_": steps_, "most": SHORT_WIDTH if short else None}
    worlds = startable(*((GLOO, HOROVOD_GLOO) if short else WORLDS))
    return {"worlds": [(world, in_processes(world, measure_world, **how)) for world in worlds]}


def tables(found: Found) -> str:
    rows = [
        [
            world_name(world), name, f"{one['seconds'] * 1e3:.1f}", shown_ratio(one), f"{one['state_mb']:.1f}",
            f"{one['largest_difference']:.0e}",
        ]
        for world, ways in found["worlds"] for name, one in ways.items()
    ]  # fmt: skip
    return table(["world", "way", "ms a step", "ratio (quartiles)", "state a rank, MB", "weights differ by"], rows)


if __name__ == "__main__":
    run(measure, tables)
