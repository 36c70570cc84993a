"""Balanced batches: an epoch of samples of different lengths, divided by their lengths or not.

    python benchmarks/balanced_batches.py

The language model's recipe and the speaker recipe, with lognormal lengths (sigma 1), padded to the longest sample of a
batch, on two and four processes of this machine. Each way trains an epoch of the same samples with the same loop:

- every W-th sample of a global batch (UniTrain without lengths, and PyTorch's DistributedSampler);
- UniTrain with lengths, and with ``length + length**2 / 1000`` instead, as transformers counts attention;
- transformers' length grouping, which changes the global batches, and its batch rebalancing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import unitrain
from shared.processes import in_processes
from shared.report import Found, run, table
from shared.rounds import alternate, compared, shown_ratio
from unitrain.features.balanced_batches import BalancedBatches
from unitrain.recipes.speaker_verification import model as speaker_model
from unitrain.recipes.text import gpt

PROCESSES = (2, 4)
PLAIN, BALANCED, QUADRATIC, GROUPED, REBALANCED = (
    "every W-th sample", "lengths", "lengths, with squares",
    "transformers, grouped by length", "transformers, rebalanced",
)  # fmt: skip
ROUNDS, SHORT = 5, 2
VOCABULARY = 256


class Task(NamedTuple):
    """A model, the lengths of its samples, and how it trains on some of them."""

    model: nn.Module
    lengths: list[int]
    batch: int
    """Samples per step, over all processes."""
    loss: Callable[[nn.Module, list[int]], Tensor]


def _lengths(samples: int, median: float, least: int, most: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(np.log(median), 1.0, samples)
    return [int(length) for length in drawn.clip(least, most)]


def language_model(short: bool) -> Task:
    lengths = _lengths(16 if short else 1024, 48, 4, 512)

    def loss(model: nn.Module, samples: list[int]) -> Tensor:
        rows = [torch.arange(lengths[one]) * (one + 1) % VOCABULARY for one in samples]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        targets = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return Task(gpt.GPT(VOCABULARY, 512, 2, 64, 4, 0.0), lengths, 8 if short else 64, loss)


def speaker(short: bool) -> Task:
    rate = 16000
    lengths = _lengths(8 if short else 512, 0.5 * rate, rate // 8, 4 * rate)

    def loss(model: nn.Module, samples: list[int]) -> Tensor:
        rows = [torch.sin(torch.arange(lengths[one]) / (one + 1)) for one in samples]
        embeddings: Tensor = model(nn.utils.rnn.pad_sequence(rows, batch_first=True))
        return embeddings.square().mean()

    return Task(speaker_model.build("resnetse10"), lengths, 8 if short else 32, loss)


TASKS = {"language model": language_model, "speaker": speaker}


def _batches(name: str, task: Task, strategy: unitrain.Strategy) -> Iterable[list[int]]:
    """Return what yields this rank's samples of each step of an epoch."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler, DistributedLengthGroupedSampler

    lengths, ranks, each = task.lengths, strategy.world_size, task.batch // strategy.world_size
    sharing: dict[str, Any] = {"global_batch_size": task.batch, "shuffle": True, "collate_fn": list}
    if name == PLAIN:
        return strategy.dataloader(range(len(lengths)), **sharing)
    if name == BALANCED:
        return strategy.dataloader(range(len(lengths)), batching=BalancedBatches(lengths=lengths), **sharing)
    if name == QUADRATIC:
        costs = [length + length**2 / 1000 for length in lengths]
        return strategy.dataloader(range(len(lengths)), batching=BalancedBatches(lengths=costs), **sharing)
    if name == GROUPED:
        grouped = DistributedLengthGroupedSampler(each, num_replicas=ranks, rank=strategy.rank, lengths=lengths)
        return DataLoader(range(len(lengths)), each, sampler=grouped, collate_fn=list)  # type: ignore[arg-type]
    rebalanced = BatchRebalanceSampler(lengths, task.batch, ranks, 1, rank=strategy.rank)
    return DataLoader(range(len(lengths)), batch_sampler=rebalanced, collate_fn=list)  # type: ignore[arg-type]


def measure_world(which: str, rounds: int, short: bool) -> Found | None:
    """Measure an epoch of a task in each way, in this process's world."""
    with unitrain.init(device="cpu") as strategy:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        task = TASKS[which](short)
        model, optimizer = strategy.prepare(task.model, torch.optim.SGD(task.model.parameters(), lr=1e-3))
        padded: dict[str, list[int]] = {}
        ways = {}
        for name in (PLAIN, BALANCED, QUADRATIC, GROUPED, REBALANCED):
            batches, costs = _batches(name, task, strategy), padded.setdefault(name, [])
            ways[name] = partial(_epoch, strategy, task, model, optimizer, batches, costs)
        found: Found = {**compared(alternate(ways, rounds, before=strategy.barrier), PLAIN)}
        for name, costs in padded.items():
            steps = len(task.lengths) // task.batch
            mine = torch.tensor(costs[-steps:], dtype=torch.float64)
            every = strategy.communicator.all_gather(mine.unsqueeze(0))
            found[name]["padding"] = 1 - sum(task.lengths) / float(every.sum())
            found[name]["waiting"] = 1 - float(every.sum() / (every.max(0).values.sum() * strategy.world_size))
            found[name]["tokens_per_second"] = sum(task.lengths) / found[name]["seconds"]
        return found if strategy.is_main else None


def _epoch(
    strategy: unitrain.Strategy,
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[list[int]],
    costs: list[int],
) -> None:
    for samples in batches:
        costs.append(len(samples) * max(task.lengths[one] for one in samples))
        strategy.step(task.loss(model, samples), optimizer, weight=sum(task.lengths[one] for one in samples))


def measure(short: bool) -> Found:
    how: dict[str, Any] = {"rounds": SHORT if short else ROUNDS, "short": short}
    worlds = PROCESSES[:1] if short else PROCESSES
    return {
        "tasks": {
            which: {
                str(ranks): in_processes(("torchrun", ranks), measure_world, which=which, **how) for ranks in worlds
            }
            for which in TASKS
        }
    }


def tables(found: Found) -> str:
    rows = [
        [
            which, ranks, name, f"{way['tokens_per_second']:,.0f}", shown_ratio(way), f"{way['padding']:.0%}",
            f"{way['waiting']:.0%}",
        ]
        for which, worlds in found["tasks"].items()
        for ranks, ways in worlds.items()
        for name, way in ways.items()
    ]  # fmt: skip
    head = [
        "recipe",
        "processes",
        "batches",
        "tokens/s",
        "time, ratio (quartiles)",
        "padding",
        "waiting for the largest",
    ]
    return table(head, rows)


if __name__ == "__main__":
    run(measure, tables)
