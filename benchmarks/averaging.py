"""Averaging gradients: by hand and with UniTrain, beside the communication alone; and over slow links, compressed.

    sudo python benchmarks/averaging.py

**At full speed**: a whole step with the gradients of ResNet-50 and of a 12-layer transformer is timed: forward,
backward, averaging, SGD. Forward and backward are as cheap as possible (each gradient costs one write), so most of the
time goes to averaging. The step without communication is measured too, and as a lower bound one all-reduce of as many
bytes by the communication library alone: MPI's through mpi4py, or gloo's. By hand means DistributedDataParallel with
its default options, or ``hvd.DistributedOptimizer``. It takes part twice, which shows the spread. Weights must be equal
bit for bit.

**Over slow links**: two network namespaces, joined by a link that ``tc`` slows down to 100 Mbit/s or 1 Gbit/s, stand
for two hosts. DDP averages ResNet-18's gradients (45 MB) with each compression, without accumulation and over 4
micro-batches, or its weights every 32 steps (``local_sgd``); an optimizer step is timed.
The settings belong to a strategy, so each turn starts one. Its first steps, in which buckets are built or compression
has not begun, are not counted. Losses are compared on scikit-learn's digits over a fast link, where rounds of
``local_sgd`` end with the epoch, after 22 steps: the effect of a setting on the loss does not depend on the link.

**The language model** of the recipes is trained over the slowest link with AdamW and a constant learning rate after a
warm-up, for as many steps, and for as long. The validation loss is that of the weights that ranks share. Sent is what
one rank's interface sends, with all overheads.

Links need root, iproute2, and a kernel with tbf; those that can't be made are skipped.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, get_args

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unitrain
from loops import by_hand
from shared import workloads
from shared.language import LanguageModel
from shared.processes import GLOO, HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, ratios, run, table
from shared.rounds import Way, alternate, compared, repeat, shown_ratio, turns
from shared.slow_link import DEVICE, LINKS, lacking, slow_link
from shared.workloads import OnlyParameters, Shape, bit_equal, mlp, resnet18
from unitrain import StrategyConfig

WORLDS = (GLOO, HOROVOD_MPI, HOROVOD_GLOO)
MODELS = {"resnet50_shapes": "ResNet-50, 161 tensors, 102 MB", "transformer_shapes": "12-layer transformer, 151 MB"}
BASE, CONTROL, VIEWS, OURS = "by hand", "by hand, again", "by hand, gradients as bucket views", "UniTrain"
LOCAL, FLOOR = "step without communication", "one all-reduce by the transport"
LENGTH, SHORT = (11, 2), (2, 1)  # rounds, and steps per round
SHORT_ELEMENTS = 2**14  # maximum number of elements of a tensor

COMPRESSIONS: tuple[str, ...] = get_args(StrategyConfig.model_fields["compression"].annotation)
ACCUMULATED = ("none", "powersgd")
PLAIN = "none"
ROUND = 32
Settings = dict[str, dict[str, Any]]


def in_rounds(steps: int) -> Settings:
    """Return the settings that average weights after every few steps."""
    return {
        f"local SGD, {steps} steps": {"local_sgd": {"steps": steps, "outer_lr": 1.0, "outer_momentum": 0.0}},
        f"DiLoCo, {steps} steps": {"local_sgd": {"steps": steps}},
    }


SETTINGS: Settings = {
    **{name: {"compression": name} for name in COMPRESSIONS},
    **{f"{name}, accumulate 4": {"compression": name, "accumulate": 4} for name in ACCUMULATED},
    **in_rounds(ROUND),
    f"DiLoCo, {ROUND} steps, bf16": {"local_sgd": {"steps": ROUND}, "compression": "bf16"},
}
LINK_LENGTH, SHORT_LINK = (2, 2), (2, 1)  # rounds, and steps per round
# Warm-up steps, in which buckets are built; PowerSGD starts with two exact steps.
WARM, WARM_POWERSGD = 1, 3
BATCH = 64
SEEDS, EPOCHS, SHORT_SEEDS, SHORT_EPOCHS = 3, 12, 1, 1
# Of the language model: steps, steps of a round, width, number of windows to validate with.
LANGUAGE, SHORT_LANGUAGE = (96, 16, 96, 256), (4, 4, 16, 8)

Made = tuple[nn.Module, Way]


def transport(strategy: unitrain.Strategy, meeting: str) -> Any:
    """Return a function that sums a tensor in place with the communication library alone."""
    if strategy.launch.launcher == "mpirun":
        from mpi4py import MPI

        return lambda tensor: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())
    if not dist.is_initialized():
        store = dist.FileStore(meeting, strategy.world_size)
        dist.init_process_group("gloo", store=store, rank=strategy.rank, world_size=strategy.world_size)
    return dist.all_reduce


def steps(strategy: unitrain.Strategy, shapes: list[Shape]) -> dict[str, Made]:
    """Return the model and the step of each way."""
    scale = torch.tensor(float(strategy.rank + 1))

    def make() -> tuple[nn.Module, Any]:
        model = OnlyParameters(shapes)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def step_by_hand(model: nn.Module, optimizer: Any) -> Way:
        def step() -> None:
            optimizer.zero_grad()
            loss: Tensor = model(scale)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    def hand(**options: Any) -> Made:
        model, optimizer = make()
        if strategy.config.backend == "ddp":
            model = DistributedDataParallel(model, **options)
        else:
            named = model.named_parameters()
            optimizer = by_hand.horovod().DistributedOptimizer(optimizer, named_parameters=named)
        return model, step_by_hand(model, optimizer)

    made: dict[str, Made] = {BASE: hand(), CONTROL: hand()}
    if strategy.config.backend == "ddp":
        made[VIEWS] = hand(gradient_as_bucket_view=True)
    model, optimizer = strategy.prepare(*make())
    made[OURS] = (model, lambda: strategy.step(model(scale), optimizer))
    alone, its_optimizer = make()
    made[LOCAL] = (alone, step_by_hand(alone, its_optimizer))
    return made


def measure_world(model: str, rounds: int, steps_: int, most: int | None, meeting: str) -> Found | None:
    """Measure each way in this process's world; tensors have at most ``most`` elements."""
    shapes: list[Shape] = getattr(workloads, model)()
    if most is not None:
        shapes = [(min(most, torch.Size(shape).numel()),) for shape in shapes]
    with unitrain.init(device="cpu") as strategy:
        torch.set_num_threads(1)
        made = steps(strategy, shapes)
        flat = torch.zeros(sum(torch.Size(shape).numel() for shape in shapes))
        reduce_alone = transport(strategy, meeting)
        once: dict[str, Way] = {name: step for name, (_, step) in made.items()}
        once[FLOOR] = lambda: reduce_alone(flat)
        ways: dict[str, Way] = {name: partial(repeat, way, steps_) for name, way in once.items()}
        found: Found = compared(alternate(ways, rounds, before=strategy.barrier), BASE, steps_)
        for name, (trained, _) in made.items():
            if name != LOCAL:
                found[name]["weights_bit_equal"] = bit_equal(made[BASE][0], trained)
        if strategy.launch.launcher == "horovodrun":
            dist.destroy_process_group()
        return found if strategy.is_main else None


def complete(settings: dict[str, Any], exact_steps: int) -> dict[str, Any]:
    """Return a strategy's settings. With PowerSGD, the first ``exact_steps`` steps are not compressed."""
    settings = {"device": "cpu", **settings}
    is_lossy = settings.get("compression") == "powersgd"
    return {**settings, "ddp": {"powersgd_start_step": exact_steps}} if is_lossy else settings


def measure_link(rounds: int, steps: int, small: bool) -> Found | None:
    """Measure a step with each setting, in turns, each with its own strategy."""
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    main = False
    for counts, name in turns(list(SETTINGS), rounds):
        if not counts and name != PLAIN:
            continue  # each strategy has its own warm-up
        accumulate = SETTINGS[name].get("accumulate", 1)
        warm = WARM_POWERSGD if "powersgd" in name else WARM
        whole = SETTINGS[name].get("local_sgd", {}).get("steps", 1)  # a round begins with the first counted step
        with unitrain.init(**complete(SETTINGS[name], warm - 1)) as strategy:
            torch.set_num_threads(1)
            main = strategy.is_main
            task = (mlp if small else resnet18)(strategy.rank)
            model, optimizer = strategy.prepare(*task.make())
            start = 0.0
            warm, counted = (warm, steps) if whole == 1 else (whole, whole)
            for step in range(warm + counted):
                if step == warm:
                    strategy.barrier()
                    start = time.perf_counter()
                for _ in range(accumulate):
                    strategy.step(task.loss(model(task.inputs)), optimizer)
            if counts:
                seconds[name].append((time.perf_counter() - start) / counted)
    return compared(seconds, PLAIN) if main else None


def measure_learning(seeds: int, epochs: int) -> Found | None:
    """Train on digits with each setting and seed, and return the mean loss of each epoch, and the accuracies."""
    images, labels = digits()
    held_out = len(images) // 5
    exact = max(2, epochs * (len(images) - held_out) // BATCH // 10)  # a tenth of all steps
    found: Found = {}
    main = False
    for name in SETTINGS:
        curves, accuracies = [], []
        for seed in range(seeds):
            with unitrain.init(seed=seed, **complete(SETTINGS[name], exact)) as strategy:
                torch.set_num_threads(1)
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
        found[name] = {"losses": means, "accuracies": accuracies}
    return found if main else None


def measure_language(steps: int, round_: int, width: int, windows: int) -> Found | None:
    """Train the language model with each setting for as many steps, and on for as long as ``PLAIN`` takes for them."""
    compressed: Settings = {name: {"compression": name} for name in (PLAIN, "bf16", "powersgd")}
    found: Found = {}
    main = False
    for name, settings in {**compressed, **in_rounds(round_)}.items():
        with unitrain.init(**complete(settings, max(2, steps // 10)), clip_norm=1.0) as strategy:
            torch.set_num_threads(1)
            main = strategy.is_main
            model = LanguageModel(strategy, width, windows)
            before = psutil.net_io_counters(pernic=True)[DEVICE].bytes_sent
            seconds = model.train(0, steps)
            sent = psutil.net_io_counters(pernic=True)[DEVICE].bytes_sent - before
            loss = model.validate()
            base_s = found[PLAIN]["seconds"] * steps if found else seconds
            # Whole rounds, between which the ranks' weights are equal.
            then = max(steps, round(steps * base_s / seconds / round_) * round_)
            model.train(steps, then)
            found[name] = {
                "seconds": seconds / steps, "bytes": sent / steps, "loss": loss,
                "steps": then, "loss_then": model.validate(),
            }  # fmt: skip
    return {"steps": steps, "settings": found} if main else None


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits (1797, 64) and their classes, in a fixed random order."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def measure(short: bool) -> Found:
    return {
        "cases": measure_at_full_speed(short),
        **measure_links(short),
        "learning": in_processes(
            GLOO, measure_learning, seeds=SHORT_SEEDS if short else SEEDS, epochs=SHORT_EPOCHS if short else EPOCHS
        ),
    }


def measure_at_full_speed(short: bool) -> list[Found]:
    rounds, steps_ = SHORT if short else LENGTH
    how: dict[str, Any] = {"rounds": rounds, "steps_": steps_, "most": SHORT_ELEMENTS if short else None}
    cases = []
    for model in list(MODELS)[:1] if short else MODELS:
        for world in startable(*((GLOO, HOROVOD_GLOO) if short else WORLDS)):
            with tempfile.TemporaryDirectory() as folder:
                ways = in_processes(world, measure_world, model=model, meeting=str(Path(folder, "meeting")), **how)
            cases.append({"model": model, "world": world, "ways": ways})
    return cases


def measure_links(short: bool) -> Found:
    rounds, steps = SHORT_LINK if short else LINK_LENGTH
    links: dict[str, Any] = {}
    left_out = {}
    language = None
    for kind in list(LINKS)[1:] if short else LINKS:
        reason = lacking()
        if reason is None:
            print(f"averaging: measure_link over {kind}", file=sys.stderr)
            try:
                with slow_link(kind) as link:
                    links[kind] = link.in_both(measure_link, rounds=rounds, steps=steps, small=short)
                    if language is None:
                        sizes = SHORT_LANGUAGE if short else LANGUAGE
                        arguments = dict(zip(("steps", "round_", "width", "windows"), sizes, strict=True))
                        language = {"link": kind, **link.in_both(measure_language, **arguments)}
            except OSError as error:
                reason = str(error)
        if reason is not None:
            left_out[kind] = reason
    return {"links": links, "left_out": left_out, "language": language}


def tables(found: Found) -> str:
    parts = []
    for model, title in MODELS.items():
        cases = [(world_name(case["world"]), case["ways"]) for case in found["cases"] if case["model"] == model]
        if cases:
            parts.append(f"**{title}**\n\n{ratios('world', cases, BASE, CONTROL)}")
    trained = [one for case in found["cases"] for one in case["ways"].values() if "weights_bit_equal" in one]
    equal = all(one["weights_bit_equal"] for one in trained)
    parts.append(f"Weights: {'bit-equal' if equal else 'DIFFERENT'}.\n")
    learned = found["learning"]
    rows = [
        [
            name,
            *(_over_link(its[name]) for its in found["links"].values()),
            f"{one['losses'][-1]:.4f}, {statistics.mean(one['accuracies']):.2%}",
        ]
        for name, one in learned.items()
    ]
    seeds = len(next(iter(learned.values()))["accuracies"])
    head = [
        "setting",
        *(f"{kind}, ms a step" for kind in found["links"]),
        f"loss and accuracy on digits, {seeds} seeds",
    ]
    parts.append(table(head, rows))
    if found["language"] is not None:
        parts.append(_language(found["language"]))
    parts += [f"Left out: {kind}, because {reason}.\n" for kind, reason in found["left_out"].items()]
    return "\n".join(parts)


def _language(found: Found) -> str:
    steps = found["steps"]
    head = [
        "setting",
        "ms a step",
        "MB sent a step",
        f"loss after {steps} steps",
        "steps in the same time",
        "loss then",
    ]
    rows = [
        [name, f"{one['seconds'] * 1e3:,.0f}", f"{one['bytes'] / 1e6:.2f}", f"{one['loss']:.3f}", one["steps"],
         f"{one['loss_then']:.3f}"]
        for name, one in found["settings"].items()
    ]  # fmt: skip
    return f"**The language model over {found['link']}**\n\n{table(head, rows)}"


def _over_link(one: Found) -> str:
    return f"{one['seconds'] * 1e3:,.0f}: {shown_ratio(one)}"


if __name__ == "__main__":
    run(measure, tables)
