"""The cost of agreeing on the end of streams of different lengths, in three ways.

    python benchmarks/uneven_streams.py

- ahead: UniTrain's, one sum for each step, started before the previous step is computed and read after it.
- before: the same sum, waited for before each step.
- join: torch's Join around DistributedDataParallel, compared with the same loop without it. It does not know how many
  samples a rank has left, so its mean over the samples is wrong; it is here for its cost. Horovod's join costs nothing
  until the end, but has the same fault, and the ranks can't end together.

Each is timed against the same loop without agreement, in rounds that take turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import unitrain
from shared.processes import GLOO, HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.rounds import alternate, compared, shown_ratio
from unitrain.data.order.sharding import EpochPlan
from unitrain.data.reading.agreement import Agreement
from unitrain.data.reading.stream import Piece

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORLDS = (GLOO, HOROVOD_MPI, HOROVOD_GLOO)
ROWS, WIDTH = 32, 256
LENGTH, SHORT = (15, 200), (2, 3)  # rounds, and steps per round


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    return made, torch.optim.SGD(made.parameters(), lr=0.01)


def loops(strategy: unitrain.Strategy) -> dict[str, tuple[Callable[[int], None], Callable[[int], None]]]:
    """Return, for each way, its loop over a number of steps, and the same loop without agreement."""
    batch = torch.randn(ROWS, WIDTH)
    ours, optimizer = strategy.prepare(*model())
    agreement = Agreement(
        strategy.communicator, EpochPlan(0, ROWS * strategy.world_size, 1, strategy.rank, strategy.world_size, False)
    )

    def ahead(steps: int) -> Iterator[Any]:
        pieces = itertools.repeat(Piece(None, ROWS, batch, 1), steps)
        return (batch for _, batch in agreement.micro_batches(pieces, 0, 0))

    def before(steps: int) -> Iterator[Any]:
        return itertools.takewhile(
            lambda _: strategy.all_reduce(torch.tensor(ROWS)).item() > 0, itertools.repeat(batch, steps)
        )

    def trained(batches: Callable[[int], Iterator[Any]]) -> Callable[[int], None]:
        def loop(steps: int) -> None:
            for inputs in batches(steps):
                strategy.step(ours(inputs).square().mean(), optimizer)

        return loop

    without = trained(lambda steps: itertools.repeat(batch, steps))
    made = {"ahead": (trained(ahead), without), "before": (trained(before), without)}
    if strategy.config.backend == "ddp":
        plain, its_optimizer = model()
        wrapped = DistributedDataParallel(plain)

        def joined(join: bool) -> Callable[[int], None]:
            def loop(steps: int) -> None:
                with Join([wrapped]) if join else nullcontext():
                    for _ in range(steps):
                        its_optimizer.zero_grad()
                        wrapped(batch).square().mean().backward()
                        its_optimizer.step()

            return loop

        made["join"] = (joined(True), joined(False))
    return made


def measure_world(rounds: int, steps: int) -> Found | None:
    """Measure each way of this world, compared with its loop without agreement."""
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        found = {}
        for name, (way, without) in loops(strategy).items():
            pair = {name: partial(way, steps), "without": partial(without, steps)}
            found[name] = compared(alternate(pair, rounds, before=strategy.barrier), "without", steps)
        return found if strategy.is_main else None


def measure(short: bool) -> Found:
    rounds, steps = SHORT if short else LENGTH
    worlds = [GLOO] if short else startable(*WORLDS)
    return {"worlds": [(world, in_processes(world, measure_world, rounds=rounds, steps=steps)) for world in worlds]}


def tables(found: Found) -> str:
    rows = [
        [
            world_name(world), name, f"{one['without']['seconds'] * 1e6:.0f}", f"{one[name]['seconds'] * 1e6:.0f}",
            shown_ratio(one[name]),
        ]
        for world, ways in found["worlds"] for name, one in ways.items()
    ]  # fmt: skip
    return table(["world", "way", "without, µs a step", "with, µs a step", "ratio (quartiles)"], rows)


def plot(found: Found, figure: Figure) -> None:
    axis = figure.subplots()
    for place, (_, ways) in enumerate(found["worlds"]):
        for i, (name, one) in enumerate(ways.items()):
            label = name if place == 0 else None
            axis.bar(place + 0.25 * (i - 1), one[name]["ratio"], 0.2, color=f"C{i}", label=label)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(found["worlds"])), [world_name(world) for world, _ in found["worlds"]], fontsize=7)
    axis.set_ylabel("time of a step / without agreement")
    axis.legend()


if __name__ == "__main__":
    run(measure, tables, plot)
