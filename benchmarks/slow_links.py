"""Slow links: the gain of compression and accumulation between two hosts, and their effect on the loss.

    sudo python benchmarks/slow_links.py

Two network namespaces, joined by a link that ``tc`` slows down, stand for the hosts: 100 Mbit/s, 1 Gbit/s, and 10 ms
round trip. DDP averages ResNet-18's gradients (45 MB) with each compression, without accumulation and over 4
micro-batches; the time is that of an optimizer step. The settings belong to a strategy, so each turn starts one. Its
first steps, in which buckets are built or compression has not begun, are not counted. The loss curves are those of an
MLP on scikit-learn's digits, on a fast link: the effect of a setting on the loss does not depend on the link.

Needs root, iproute2, and a kernel with tbf (for the rates) and netem (for the delay). Links that can't be made are
skipped.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unitrain
from shared.processes import GLOO, in_processes
from shared.report import Found, run, table
from shared.rounds import compared, shown_ratio, turns
from shared.slow_link import LINKS, lacking, slow_link
from shared.workloads import mlp, resnet18
from unitrain import StrategyConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPRESSIONS: tuple[str, ...] = get_args(StrategyConfig.model_fields["compression"].annotation)
ACCUMULATIONS = (1, 4)
PLAIN = ("none", 1)
LENGTH, SHORT = (2, 2), (2, 1)  # rounds, and steps per round
# Warm-up steps, in which buckets are built; PowerSGD starts with two exact steps.
WARM, WARM_POWERSGD = 1, 3
BATCH = 64
SEEDS, EPOCHS, SHORT_SEEDS, SHORT_EPOCHS = 3, 12, 1, 1


def name_of(compression: str, accumulate: int) -> str:
    """Return the name of a setting in tables."""
    return compression if accumulate == 1 else f"{compression}, accumulate {accumulate}"


def settings_of(compression: str, exact_steps: int) -> dict[str, Any]:
    """Return a strategy's settings. With PowerSGD, the first ``exact_steps`` steps are not compressed."""
    settings: dict[str, Any] = {"device": "cpu", "threads_per_process": 1, "compression": compression}
    return {**settings, "ddp": {"powersgd_start_step": exact_steps}} if compression == "powersgd" else settings


def measure_link(rounds: int, steps: int, small: bool) -> Found | None:
    """Measure a step with each setting, in turns, each with its own strategy."""
    settings = {name_of(c, a): (c, a) for c in COMPRESSIONS for a in ACCUMULATIONS}
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    main = False
    for counts, name in turns(list(settings), rounds):
        compression, accumulate = settings[name]
        if not counts and name != name_of(*PLAIN):
            continue  # each strategy has its own warm-up
        warm = WARM_POWERSGD if compression == "powersgd" else WARM
        with unitrain.init(accumulate=accumulate, **settings_of(compression, warm - 1)) as strategy:
            main = strategy.is_main
            task = (mlp if small else resnet18)(strategy.rank)
            model, optimizer = strategy.prepare(*task.make())
            start = 0.0
            for step in range(warm + steps):
                if step == warm:
                    strategy.barrier()
                    start = time.perf_counter()
                for _ in range(accumulate):
                    strategy.step(task.loss(model(task.inputs)), optimizer)
            if counts:
                seconds[name].append((time.perf_counter() - start) / steps)
    return compared(seconds, name_of(*PLAIN)) if main else None


def measure_learning(seeds: int, epochs: int) -> Found | None:
    """Train on digits with each setting and seed, and return the mean loss of each epoch, and the accuracies."""
    images, labels = digits()
    held_out = len(images) // 5
    exact = max(2, epochs * (len(images) - held_out) // BATCH // 10)  # a tenth of all steps
    found: Found = {}
    main = False
    for compression in COMPRESSIONS:
        for accumulate in ACCUMULATIONS:
            curves, accuracies = [], []
            for seed in range(seeds):
                with unitrain.init(accumulate=accumulate, seed=seed, **settings_of(compression, exact)) as strategy:
                    main = strategy.is_main
                    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
                    model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
                    train = torch.utils.data.TensorDataset(images[held_out:], labels[held_out:])
                    loader = strategy.dataloader(train, global_batch_size=BATCH, shuffle=True)
                    curve = []
                    for _ in loader.epochs(epochs):
                        losses = strategy.meter()
                        for inputs, targets in loader:
                            loss = F.cross_entropy(model(inputs), targets)
                            strategy.step(loss, optimizer)
                            losses.add(mean=loss, count=len(targets))
                        curve.append(losses.value())
                    with strategy.evaluation(model):
                        right = model(images[:held_out]).argmax(1) == labels[:held_out]
                    curves.append(curve)
                    accuracies.append(right.double().mean().item())
            means = [statistics.mean(losses) for losses in zip(*curves, strict=True)]
            found[name_of(compression, accumulate)] = {"losses": means, "accuracies": accuracies}
    return found if main else None


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits (1797, 64) and their classes, in a fixed random order."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def measure(short: bool) -> Found:
    rounds, steps = SHORT if short else LENGTH
    links: dict[str, Any] = {}
    left_out = {}
    for kind in list(LINKS)[1:2] if short else LINKS:
        reason = lacking()
        if reason is None:
            print(f"slow_links: measure_link over {kind}", file=sys.stderr)
            try:
                with slow_link(kind) as link:
                    links[kind] = link.in_both(measure_link, rounds=rounds, steps=steps, small=short)
            except OSError as error:
                reason = str(error)
        if reason is not None:
            left_out[kind] = reason
    how = {"seeds": SHORT_SEEDS, "epochs": SHORT_EPOCHS} if short else {"seeds": SEEDS, "epochs": EPOCHS}
    return {"links": links, "left_out": left_out, "learning": in_processes(GLOO, measure_learning, **how)}  # type: ignore[arg-type]


def tables(found: Found) -> str:
    parts = []
    if found["links"]:
        rows = [
            [kind, name, f"{one['seconds'] * 1e3:,.0f}", shown_ratio(one), f"{1 / one['ratio']:.2f}"]
            for kind, its in found["links"].items()
            for name, one in its.items()
        ]
        parts.append(table(["link", "compression", "ms a step", "ratio to none (quartiles)", "speed-up"], rows))
    parts += [f"Left out: {kind}, because {reason}.\n" for kind, reason in found["left_out"].items()]
    learned = [
        [name, f"{one['losses'][-1]:.4f}", f"{statistics.mean(one['accuracies']):.2%}", len(one["accuracies"])]
        for name, one in found["learning"].items()
    ]
    parts.append(table(["compression", "last epoch's loss on digits", "accuracy", "seeds"], learned))
    return "\n".join(parts)


def plot(found: Found, figure: Figure) -> None:
    figure.set_size_inches(12, 4.5)
    left, right = figure.subplots(1, 2)
    names = list(found["learning"])
    for i, (kind, its) in enumerate(found["links"].items()):
        places = [place + 0.27 * (i - 1) for place in range(len(its))]
        left.bar(places, [one["seconds"] for one in its.values()], 0.25, label=kind)
    left.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=7)
    left.set_ylabel("seconds a step")
    if found["links"]:
        left.set_yscale("log")
        left.legend()
    for name, one in found["learning"].items():
        right.plot(range(1, len(one["losses"]) + 1), one["losses"], label=name)
    right.set_xlabel("epoch of digits")
    right.set_ylabel("loss")
    right.set_yscale("log")
    right.legend(fontsize=7)


if __name__ == "__main__":
    run(measure, tables, plot)
