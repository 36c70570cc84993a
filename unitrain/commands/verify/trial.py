"""The loop on trial, run by every rank of a launched world: all cases under one backend.

``python -m unitrain.commands.verify.trial FOLDER BACKEND DEVICE``, after whatever launcher.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import unitrain
from unitrain.commands.verify.cases import CASES, STEPS, Case, Digits, build, mean_loss, overflow
from unitrain.commands.verify.trace import Trace


def train(case: Case, backend: str, device: str) -> tuple[int, Trace]:
    """Train a case under a strategy, and return this process's rank and record."""
    trace = Trace()
    with unitrain.init(backend=backend, device=device, **{"precision": "fp64", **case.settings}) as strategy:
        model, optimizer = strategy.prepare(*build(case))
        trace.watch(optimizer)
        loader = strategy.dataloader(Digits(case.samples), global_batch_size=case.global_batch)
        samples: list[int] = []
        for _ in loader.epochs(STEPS):
            for indices, images, labels, tokens in loader:
                with strategy.autocast():
                    loss = mean_loss(case, model(images), labels, tokens)
                count = float(tokens.sum() if case.weighted else len(labels))
                samples += indices.tolist()
                trace.losses.append((loss.item() if count else 0.0, count))
                loss = overflow(case, len(trace.samples), indices, loss)
                result = strategy.step(loss, optimizer, weight=count if case.weighted else None)
                if result.stepped or result.skipped:
                    trace.samples.append(samples)
                    samples = []
                if len(trace.samples) == STEPS:
                    trace.finish(strategy.export(model))
                    return strategy.rank, trace
    raise AssertionError("a case has at least one step an epoch")


def main(folder: Path, backend: str, device: str) -> None:
    """Train every case; one that fails ends the world, after saying why."""
    for case in CASES:
        try:
            rank, trace = train(case, backend, device)
        except Exception:
            Trace(error=traceback.format_exc()).save(folder / f"{case.name}.failed{os.getpid()}.pt")
            raise
        trace.save(folder / f"{case.name}.{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
