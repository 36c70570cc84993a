"""The loop to verify: every rank of a world trains cases with one backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch

import unitrain
from unitrain.launch.detect import detect
from unitrain.testing.parity.cases import Case, Digits, Trace, build, mean_loss, overflow


def train(case: Case, init: Callable[..., unitrain.Strategy]) -> Trace:
    """Train a case with the strategy that ``init`` returns for its settings, and return this rank's record.

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
                    return trace
    raise AssertionError("a case has at least one step an epoch")


def train_all(cases: Sequence[Case], backend: str, device: str) -> list[Trace]:
    """Train cases with a backend on a device, and return this rank's record of each."""
    init = partial(unitrain.init, backend=backend, device=device)
    return [train(case, init) for case in cases]
