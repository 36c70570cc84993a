"""The loop to verify: every rank of a world trains cases with one backend.

``python -m unitrain.testing.parity.trial FOLDER BACKEND DEVICE CASE ...``, started by any launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

import unitrain
from unitrain.launch.detect import detect
from unitrain.testing.parity.cases import CASES, Case, Digits, Trace, build, mean_loss, overflow


def train(case: Case, init: Callable[..., unitrain.Strategy]) -> tuple[int, Trace]:
    """Train a case with the strategy that ``init`` returns for its settings, and return the rank and the record.

    Args:
        case: the case.
        init: takes settings, and opens a strategy. Collective.
    """
    trace = Trace()
    settings = {"precision": "fp64", **case.settings}
    if case.unequal_shares:
        # The plain loop has no ranks: shares change who reads a sample, and not the result.
        settings["shares"] = (3, *[1] * (detect(os.environ).world_size - 1))
    with init(**settings) as strategy:
        torch.set_num_threads(1)  # as in the plain loop: sums have one order
        model, optimizer, scheduler = strategy.prepare(*build(case))
        trace.watch(optimizer, strategy.full_tensor)
        # In the order of the dataset, which the plain loop takes, too.
        loader = strategy.dataloader(Digits(case.samples), global_batch_size=case.global_batch)
        samples: list[int] = []
        for _ in loader.epochs(case.steps):
            for indices, images, labels, tokens in loader:
                with strategy.autocast():
                    loss = mean_loss(case, model(images), labels, tokens)
                count = float(tokens.sum() if case.weighted else len(labels))
                # A rank that has no sample left takes part in the step with a stand-in of weight 0.
                if loader.stand_in:
                    trace.losses.append((0.0, 0.0))
                else:
                    samples += indices.tolist()
                    trace.losses.append((loss.item(), count))
                loss = overflow(case, len(trace.samples), indices, loss)
                result = strategy.step(loss, optimizer, scheduler, weight=count if case.weighted else None)
                if result.stepped and result.grad_norm is not None:
                    trace.norms.append(float(result.grad_norm))
                if result.stepped or result.skipped:
                    trace.samples.append(samples)
                    samples = []
                if len(trace.samples) == case.steps:
                    # Whole and on the CPU, whatever the backend has made of the model.
                    trace.finish(strategy.export(model))
                    return strategy.rank, trace
    raise AssertionError("a case has at least one step an epoch")


def main(folder: Path, backend: str, device: str, names: Sequence[str]) -> None:
    """Train the cases of these names, and write the record of each.

    Args:
        folder: gets a file CASE.RANK.pt for each case.
        backend: the setting ``backend``.
        device: the setting ``device``.
        names: the names of the cases.
    """
    init = partial(unitrain.init, backend=backend, device=device)
    for case in (case for case in CASES if case.name in names):
        rank, trace = train(case, init)
        torch.save(vars(trace), folder / f"{case.name}.{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
