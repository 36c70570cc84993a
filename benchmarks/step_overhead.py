"""What a training step costs over the loop that one would write by hand for the same backend.

    python benchmarks/step_overhead.py
    torchrun --nproc-per-node 2 benchmarks/step_overhead.py
    horovodrun -np 2 python benchmarks/step_overhead.py

Both loops run in the same processes, in turns, so that the machine's moods hit both. The time is the calling thread's
own on one process, and the clock's on several, where waiting is part of the cost. The hand-written loop does less: it
looks for no NaN and weighs no uneven batch. Final weights must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unitrain

ROWS, WIDTH, CLASSES = 32, 64, 10


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


def by_hand(strategy: unitrain.Strategy) -> tuple[nn.Module, Callable[[Tensor], None]]:
    """Return the model and the step that one would write for this backend, with its defaults."""
    model, optimizer = make()
    if strategy.world_size > 1 and strategy.name == "ddp":
        model = DistributedDataParallel(model)
    elif strategy.name == "horovod":
        hvd: Any = import_module("horovod.torch")
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return model, step


def ours(strategy: unitrain.Strategy) -> tuple[nn.Module, Callable[[Tensor], None]]:
    model, optimizer = strategy.prepare(*make())

    def step(loss: Tensor) -> None:
        strategy.step(loss, optimizer)

    return model, step


def measure(strategy: unitrain.Strategy, rounds: int, steps: int) -> dict[str, Any]:
    """Return microseconds a step of both loops, in rounds that alternate."""
    images, labels = batch(strategy.rank)
    clock = time.thread_time if strategy.world_size == 1 else time.perf_counter
    loops = {"by hand": by_hand(strategy), "unitrain": ours(strategy)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for round_ in range(rounds + 1):
        for name, (model, step) in loops.items():
            strategy.barrier()
            start = clock()
            for _ in range(steps):
                step(nn.functional.cross_entropy(model(images), labels))
            if round_:  # the first one warms up
                times[name].append((clock() - start) / steps * 1e6)
    pairs = list(zip(times["by hand"], times["unitrain"], strict=True))
    weights = [[p.detach() for p in model.parameters()] for model, _ in loops.values()]
    quartiles = statistics.quantiles([b / a for a, b in pairs], n=4)
    return {
        "backend": strategy.name,
        "launcher": strategy.launch.launcher,
        "world_size": strategy.world_size,
        "by_hand_us": statistics.median(times["by hand"]),
        "unitrain_us": statistics.median(times["unitrain"]),
        "over_us": statistics.median(b - a for a, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "weights_bit_equal": all(torch.equal(a, b) for a, b in zip(*weights, strict=True)),
        "rounds": rounds,
        "steps": steps,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s) a process",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="pairs of rounds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps in a round (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        found = measure(strategy, arguments.rounds, arguments.steps)
        low, high = found["ratio_quartiles"]
        strategy.print(
            f"{found['backend']} x{found['world_size']} ({found['launcher']}), us a step: "
            f"by hand {found['by_hand_us']:.1f}, unitrain {found['unitrain_us']:.1f}: "
            f"{found['over_us']:+.1f}, ratio {found['ratio']:.3f} (quartiles {low:.3f} to {high:.3f}); "
            f"weights {'bit-equal' if found['weights_bit_equal'] else 'DIFFERENT'}"
        )
        if arguments.output and strategy.is_main:
            arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
