"""Memory of a rank: a model, with and without shards; what ``resume`` adds; a sample, whole and divided over two ranks.

    python benchmarks/memory.py

A transformer of 400 MB and Adam, on two and four processes. *Tensors* are the bytes of all tensors alive; *resident* is
the memory of the process (Linux's ``VmHWM`` and ``VmRSS``), in runs of its own. Both count from before the model is
built, on the rank with the most. The batch is so small that activations hardly count.

Weights, gradients and Adam's state are four times the weights: W. With fsdp, a step on N ranks may take 1.1 W / N and
the largest unit; ``prepare`` a rank's share of the weights and the largest unit beyond the model that the script has
built, of which nothing is there if it was built under ``torch.device("meta")`` (then, the largest tensor counts, too).
``resume`` may take 64 MB beyond the state that it leaves.

The sample is a text for the recipes' transformer of 4 blocks and width 256. *One rank* is a loop by hand on rank 0,
while rank 1 waits. *Two ranks* is UniTrain with ``ranks_per_batch: 2``. Processes have one thread. Memory is the peak
of all tensors that a step makes, on the rank with the most: activations, gradients, what is gathered, and buffers.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unitrain
from shared.live_tensors import LiveTensors
from shared.processes import GLOO, HOROVOD_MPI, World, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.rounds import alternate, compared, shown_ratio
from shared.workloads import transformer

MB = 2**20
# Layers, width, rows of the batch, their length.
SIZE, SHORT_SIZE, SMALL = (20, 640, 1, 16), (16, 128, 1, 4), (2, 64, 1, 8)
RANKS, SHORT_RANKS = (2, 4), (2,)
RESUME_MB = 64
WHOLE, ON_META = "fsdp", "fsdp, meta device"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("torchrun", {"backend": "ddp"}),
    WHOLE: ("torchrun", {"backend": "fsdp"}),
    ON_META: ("torchrun", {"backend": "fsdp"}),
    "ddp, shard_optimizer": ("torchrun", {"backend": "ddp", "shard_optimizer": True}),
    "horovod, shard_optimizer": ("mpirun", {"backend": "horovod", "shard_optimizer": True}),
}
METERS = ("tensors", "resident")
ONE, TWO = "one rank", "two ranks"
# Tokens of a text, and the layers and width of the model.
TOKENS, SHORT_TOKENS, LAYERS, WIDTH, SHORT_WIDTH = (1024, 4096), (256,), 4, 256, 64
ROUNDS, SHORT_ROUNDS = 5, 2

Measured = tuple[float, float]
"""The peak of a call, and what it leaves, in MB more than before."""


def tensors(call: Callable[[], object]) -> Measured:
    with LiveTensors() as live:
        call()
    return live.peak / MB, live.bytes / MB


def resident(call: Callable[[], object]) -> Measured:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is what is resident now
    before = status("VmRSS")
    call()
    return status("VmHWM") - before, status("VmRSS") - before


def status(name: str) -> float:
    """Return a field of this process's status, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(name)


def most(strategy: unitrain.Strategy, found: dict[str, float]) -> dict[str, float] | None:
    """Return the largest values of all ranks, on rank 0."""
    ranks = strategy.communicator.all_gather_object(found)
    return {name: max(one[name] for one in ranks) for name in found} if strategy.is_main else None


def train(settings: dict[str, Any], size: list[int], meter: str, folder: str, on_meta: bool) -> dict[str, float] | None:
    """Prepare a model, make two steps, save, and return the memory of each."""
    with unitrain.init(device="cpu", **settings) as strategy:
        torch.set_num_threads(1)
        prepare, steps = parts(strategy, size, on_meta)
        warm_up(strategy, on_meta)
        measured: Callable[[Callable[[], object]], Measured] = globals()[meter]
        peak, prepared = measured(prepare)
        step_peak, stepped = measured(steps)
        model, optimizer = prepare()  # again, which only returns them
        strategy.checkpoint(folder, background=False, model=model, optimizer=optimizer).save()
        found = {"prepare": peak, "prepared": prepared, "step": prepared + step_peak, "stepped": prepared + stepped}
        return most(strategy, found)


def resume(settings: dict[str, Any], size: list[int], folder: str, on_meta: bool) -> dict[str, float] | None:
    """Return what is resident while what ``train`` has saved is resumed, beyond what is afterwards."""
    with unitrain.init(device="cpu", **settings) as strategy:
        torch.set_num_threads(1)
        prepare, _ = parts(strategy, size, on_meta)
        warm_up(strategy, on_meta)
        model, optimizer = prepare()
        peak, left = resident(strategy.checkpoint(folder, model=model, optimizer=optimizer).resume)
        return most(strategy, {"resume": peak - left})


def parts(strategy: unitrain.Strategy, size: list[int], on_meta: bool) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Return a function that builds and prepares a model and its optimizer once, and one that makes two steps."""
    task = transformer(strategy.rank, *size)
    prepared: list[Any] = []

    def prepare() -> Any:
        if not prepared:
            with torch.device("meta") if on_meta else nullcontext():
                made = task.make()
            prepared.extend(strategy.prepare(*made, initialise=initialise if on_meta else False))
        return prepared

    def steps() -> None:
        model, optimizer = prepared
        for _ in range(2):
            strategy.step(task.loss(model(task.inputs)), optimizer)

    return prepare, steps


def initialise(module: nn.Module) -> None:
    """Initialise the weights of a module as the model's constructor does, but for the layers' depth."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def warm_up(strategy: unitrain.Strategy, on_meta: bool) -> None:
    """Train a tiny model, so that what torch loads when it is first used does not count."""
    prepare, steps = parts(strategy, list(SMALL), on_meta)
    prepare()
    steps()


def divide(tokens: int, width: int, rounds: int) -> Found | None:
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
        found[ONE]["mb"] = tensors(on_one)[0]
        found[TWO]["mb"] = max(strategy.communicator.all_gather_object(tensors(on_two)[0]))
        alone, divided = on_one(), strategy.mean(on_two(), 1)  # after equally many steps
        if alone is None:
            return None
        found[ONE]["loss"], found[TWO]["loss"] = float(alone), float(divided)
        return found


def shape(size: tuple[int, int, int, int]) -> dict[str, float]:
    """Return the bytes of the weights, of the largest unit and of the largest tensor, in MB."""
    model, _ = transformer(0, *size).make()
    blocks = [mb(block) for block in model.get_submodule("blocks").children()]
    largest = max(parameter.nbytes for parameter in model.parameters()) / MB
    return {"weights": mb(model), "unit": max(*blocks, mb(model) - sum(blocks)), "tensor": largest}


def mb(module: nn.Module) -> float:
    return sum(parameter.nbytes for parameter in module.parameters()) / MB


def measure(short: bool) -> Found:
    size = SHORT_SIZE if short else SIZE
    cases = []
    for way, world, settings in ways(short):
        found = {}
        for meter in METERS:
            with tempfile.TemporaryDirectory() as folder:
                how: dict[str, Any] = {
                    "settings": settings, "size": size, "folder": folder, "on_meta": way == ON_META
                }  # fmt: skip
                found[meter] = in_processes(world, train, meter=meter, **how)
                if meter == "resident":
                    found[meter].update(in_processes(world, resume, **how))
        cases.append({"way": way, "world": world, **found})
    size_of: dict[str, Any] = {"width": SHORT_WIDTH if short else WIDTH, "rounds": SHORT_ROUNDS if short else ROUNDS}
    divided = [
        {"world": world, "tokens": tokens, "ways": in_processes(world, divide, tokens=tokens, **size_of)}
        for world in startable(GLOO, HOROVOD_MPI)
        for tokens in (SHORT_TOKENS if short else TOKENS)
    ]
    return {**shape(size), "cases": cases, "divided": divided}


def ways(short: bool) -> Iterator[tuple[str, World, dict[str, Any]]]:
    for ranks in SHORT_RANKS if short else RANKS:
        for way, (launcher, settings) in WAYS.items():
            for world in startable((launcher, ranks)):
                yield way, world, settings


def tables(found: Found) -> str:
    rows, broken = [], []
    for case in found["cases"]:
        limits = allowed(found, case)
        cells = []
        for name in ("prepare", "prepared", "step", "stepped", "resume"):
            measured = {meter: case[meter][name] for meter in METERS if name in case[meter]}
            limit = f" of {limits[name]:.0f}" if name in limits else ""
            cells.append(" / ".join(f"{value:.0f}" for value in measured.values()) + limit)
            if any(value > limits.get(name, value) for value in measured.values()):
                broken.append(f"{case['way']}: {name}, {case['world'][1]} ranks")
        rows.append([world_name(case["world"]), case["way"], *cells])
    head = ["world", "way", "prepare", "left", "two steps", "left", "resume, beyond what it leaves"]
    kept = f"NOT KEPT ({'; '.join(broken)})" if broken else "kept"
    return (
        f"{table(head, rows)}\nMB on the rank with the most, tensors / resident; *of* what is allowed: {kept}. "
        f"Resident only: resume. Weights: {found['weights']:.0f} MB; largest unit {found['unit']:.1f} MB; largest "
        f"tensor {found['tensor']:.1f} MB.\n\n{divided_table(found['divided'])}"
    )


def divided_table(cases: list[Found]) -> str:
    rows = []
    for case in cases:
        one, two = case["ways"][ONE], case["ways"][TWO]
        memory = f"{one['mb']:.0f}", f"{two['mb']:.0f} ({two['mb'] / one['mb']:.2f})"
        rows.append([world_name(case["world"]), case["tokens"], f"{one['seconds']:.2f}", shown_ratio(two), *memory])
    head = ["world", "tokens of a text", f"{ONE}, s", f"{TWO}: ratio", f"{ONE}, MB", f"each of {TWO}, MB (ratio)"]
    return table(head, rows)


def allowed(found: Found, case: Found) -> dict[str, float]:
    """Return the limits of a case in MB."""
    limits: dict[str, float] = {"resume": RESUME_MB}
    if case["way"] in (WHOLE, ON_META):
        part = found["weights"] / case["world"][1]
        built = found["tensor"] if case["way"] == ON_META else found["weights"]
        limits |= {"prepare": part + found["unit"] + built, "step": 1.1 * 4 * part + found["unit"]}
    return limits


if __name__ == "__main__":
    run(measure, tables)
