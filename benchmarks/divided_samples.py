"""Divided samples: one long text on one rank, and divided over two that share it (``ranks_per_batch: 2``).

    python benchmarks/divided_samples.py

The recipes' transformer of 4 blocks, width 256, and AdamW, float32. *One rank* is a loop by hand on rank 0, while rank
1 waits. *Two ranks* is UniTrain: each computes with a half of the text, and gathers keys and values. Each process has
one thread. Memory is the peak of all tensors that a step makes: activations, gradients, what is gathered, and buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import unitrain
from shared.live_tensors import LiveTensors
from shared.processes import GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.rounds import alternate, compared, shown_ratio
from shared.workloads import transformer

ONE, TWO = "one rank", "two ranks"
TOKENS, SHORT_TOKENS = (1024, 4096), (256,)
LAYERS, WIDTH, SHORT_WIDTH = 4, 256, 64
ROUNDS, SHORT = 5, 2


def measure_world(tokens: int, width: int, rounds: int) -> Found | None:
    """Measure a step on one text in each way, in this process's world."""
    with unitrain.init(device="cpu", ranks_per_batch=2) as strategy:
        torch.set_num_threads(1)
        task = transformer(0, LAYERS, width, 1, tokens)
        plain, plain_optimizer = task.make()
        model, optimizer = strategy.prepare(*task.make())
        group = strategy.batch_group
        targets = group.part(task.targets, 1)

        def on_one() -> Tensor | None:
            if not strategy.is_main:
                return None
            loss = task.loss(plain(task.inputs))
            loss.backward()  # type: ignore[no-untyped-call]
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            return loss.detach()

        def on_two() -> Tensor:
            loss = F.cross_entropy(model(task.inputs, group).flatten(0, 1), targets.flatten())
            strategy.step(loss, optimizer, weight=targets.numel())
            return loss.detach()

        found: Found = {**compared(alternate({ONE: on_one, TWO: on_two}, rounds, before=strategy.barrier), ONE)}
        found[ONE]["mb"] = peak(on_one)
        found[TWO]["mb"] = max(strategy.communicator.all_gather_object(peak(on_two)))
        alone, divided = on_one(), strategy.mean(on_two(), 1)  # after equally many steps
        if alone is None:
            return None
        found[ONE]["loss"], found[TWO]["loss"] = float(alone), float(divided)
        return found


def peak(step: Callable[[], object]) -> float:
    """Return the peak of all tensors that a step makes, in MB."""
    with LiveTensors() as live:
        step()
    return live.peak / 2**20


def measure(short: bool) -> Found:
    how: dict[str, Any] = {"width": SHORT_WIDTH if short else WIDTH, "rounds": SHORT if short else ROUNDS}
    return {
        "cases": [
            {"world": world, "tokens": tokens, "ways": in_processes(world, measure_world, tokens=tokens, **how)}
            for world in startable(GLOO, HOROVOD_MPI)
            for tokens in (SHORT_TOKENS if short else TOKENS)
        ]
    }


def tables(found: Found) -> str:
    rows = []
    for case in found["cases"]:
        one, two = case["ways"][ONE], case["ways"][TWO]
        memory = f"{one['mb']:.0f}", f"{two['mb']:.0f} ({two['mb'] / one['mb']:.2f})"
        rows.append([world_name(case["world"]), case["tokens"], f"{one['seconds']:.2f}", shown_ratio(two), *memory])
    head = ["world", "tokens", f"{ONE}, s", f"{TWO}: ratio", f"{ONE}, MB", f"each of {TWO}, MB (ratio)"]
    return table(head, rows)


if __name__ == "__main__":
    run(measure, tables)
