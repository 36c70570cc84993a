"""What it costs that ranks agree on the end of streams of different lengths, by three ways to agree.

    torchrun --nproc-per-node 2 benchmarks/uneven_streams.py
    horovodrun -np 2 python benchmarks/uneven_streams.py

- ahead: UniTrain's, one sum for each step, begun before the step before is computed and read after it.
- before: the same sum, waited for before each step.
- join: torch's Join around DistributedDataParallel, against the same loop without it. It does not know how many samples
  a rank has left, and so leaves the mean over them wrong; it stands here for its price. Horovod's join costs nothing
  until the end, but has the same fault, and no way to end together.

Each is timed against the same loop without agreement, in rounds that take turns; what is shown are medians of the
rounds' ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import unitrain
from unitrain.data.agreement import Agreement
from unitrain.data.sharding import EpochPlan
from unitrain.data.stream import Piece

ROWS, WIDTH = 32, 256


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    return made, torch.optim.SGD(made.parameters(), lr=0.01)


def loops(strategy: unitrain.Strategy) -> dict[str, tuple[Callable[[int], None], Callable[[int], None]]]:
    """Return each way's loop over so many steps, and the same without agreement."""
    batch = torch.randn(ROWS, WIDTH)
    ours, optimizer = strategy.prepare(*model())
    agreement = Agreement(
        strategy, EpochPlan(0, ROWS * strategy.world_size, 1, strategy.rank, strategy.world_size, False)
    )

    def ahead(steps: int) -> Iterator[Any]:
        pieces = itertools.repeat(Piece(None, ROWS, batch, 1), steps)
        return (batch for _, batch in agreement.micro_batches(pieces, 0, 0))

    def before(steps: int) -> Iterator[Any]:
        return itertools.takewhile(
            lambda _: strategy.sum(torch.tensor(ROWS)).item() > 0, itertools.repeat(batch, steps)
        )

    def trained(batches: Callable[[int], Iterator[Any]]) -> Callable[[int], None]:
        def loop(steps: int) -> None:
            for inputs in batches(steps):
                strategy.step(ours(inputs).square().mean(), optimizer)

        return loop

    without = trained(lambda steps: itertools.repeat(batch, steps))
    made = {"ahead": (trained(ahead), without), "before": (trained(before), without)}
    if strategy.name == "ddp":
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


def measure(strategy: unitrain.Strategy, rounds: int, steps: int) -> dict[str, Any]:
    """Return microseconds a step, and the ratio to the loop without agreement."""

    def seconds(loop: Callable[[int], None]) -> float:
        strategy.barrier()
        start = time.perf_counter()
        loop(steps)
        return time.perf_counter() - start

    found: dict[str, list[tuple[float, float]]] = {}
    ways = loops(strategy)
    for round_ in range(rounds + 1):
        for name, pair in ways.items():
            times = (seconds(pair[0]), seconds(pair[1]))
            if round_:  # the first one warms up
                found.setdefault(name, []).append(times)
    return {
        name: {
            "us": statistics.median(a for a, _ in times) / steps * 1e6,
            "without_us": statistics.median(b for _, b in times) / steps * 1e6,
            "ratio": statistics.median(a / b for a, b in times),
            "ratio_quartiles": [statistics.quantiles([a / b for a, b in times], n=4)[i] for i in (0, 2)],
        }
        for name, times in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="pairs of rounds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps in a round (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        figures = measure(strategy, arguments.rounds, arguments.steps)
        for name, one in figures.items():
            low, high = one["ratio_quartiles"]
            strategy.print(
                f"{strategy.name} x{strategy.world_size}, {name}: {one['us']:.0f} us a step, {one['without_us']:.0f} "
                f"without: ratio {one['ratio']:.3f} (quartiles {low:.3f} to {high:.3f})"
            )
        if arguments.output and strategy.is_main:
            about = {"backend": strategy.name, "world_size": strategy.world_size, "torch": torch.__version__}
            arguments.output.write_text(json.dumps({**about, "ways": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
