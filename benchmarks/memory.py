"""Memory of a rank: a model, its gradients and its optimizer, with and without shards; and what ``resume`` adds.

    python benchmarks/memory.py

A transformer of 400 MB and Adam, on two and four processes. *Tensors* are the bytes of all tensors alive; *resident* is
the memory of the process (Linux's ``VmHWM`` and ``VmRSS``), in runs of its own. Both count from before the model is
built, on the rank with the most. The batch is so small that activations hardly count.

Weights, gradients and Adam's state are four times the weights: W. With fsdp, a step on N ranks may take 1.1 W / N and
the largest unit; ``prepare`` a rank's share of the weights and the largest unit beyond the model that the script has
built, of which nothing is there if it was built under ``torch.device("meta")`` (then, the largest tensor counts, too).
``resume`` may take 64 MB beyond the state that it leaves.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unitrain
from shared.live_tensors import LiveTensors
from shared.processes import World, in_processes, startable, world_name
from shared.report import Found, run, table
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
    return {**shape(size), "cases": cases}


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
        f"tensor {found['tensor']:.1f} MB."
    )


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
