"""The time of a training step beside a hand-written loop, with UniTrain and with other frameworks.

    python benchmarks/step_overhead.py

A tiny MLP and ResNet-18, plain and with accumulation, clipping and metrics, on one process and on two under each
launcher; and a transformer with sharded weights (FSDP) on two. All loops run in the same processes, in turns. On one
process, CPU time of the calling thread is measured, so that other work on the machine counts little. On several, it is
wall-clock time, since waiting is part of the cost.

The hand-written loop takes part twice; the difference between its two copies is the spread of the run. It does less
than UniTrain: it does not check for NaN, and does not weight uneven batches. All loops do the same arithmetic, so final
weights must be equal bit for bit. Sharded weights with clipping differ by rounding, since UniTrain and DDP sum the norm
in another order than FSDP2.

Accelerate and Lightning Fabric do not run on Horovod. Composer (mosaicml 0.32.1) is missing because it needs a torch
older than 2.7.1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import unitrain
from loops import ACCUMULATE, CLIP_NORM, Loop, by_hand, ours
from shared import workloads
from shared.processes import ALONE, GLOO, HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, ratios, run
from shared.rounds import alternate, compared
from shared.workloads import Task, bit_equal, transformer

WORLDS = (ALONE, GLOO, HOROVOD_MPI, HOROVOD_GLOO)
STYLES = ("plain", "full")
BASE, CONTROL, OURS = "by hand", "by hand, again", "UniTrain"
TITLES = {
    ("mlp", "plain"): "Tiny MLP (64-64-10, 32 rows), plain",
    ("mlp", "full"): "Tiny MLP, accumulation over 4, clipping, metrics",
    ("resnet18", "plain"): "ResNet-18 (8 images of 32 x 32), plain",
    ("resnet18", "full"): "ResNet-18, accumulation over 4, clipping, metrics",
}
# For each task, the rounds and the plain steps per round: on one process, and on two.
LENGTHS = {"mlp": ((21, 400), (15, 120)), "resnet18": ((7, 4), (9, 3))}
SHORT = (2, 2)
SHORT_CASES = ((GLOO, "full"), (HOROVOD_GLOO, "plain"))

FSDP, FSDP_AGAIN, DDP = "FSDP2 by hand", "FSDP2 by hand, again", "DDP by hand"
# For each size, the layers, the width, the rows and the length of a batch, then the rounds and the steps in each.
SIZES = {
    "small: 4 blocks of 0.2 MB, 4 rows of 32 bytes": ((4, 64, 4, 32), (15, 10)),
    "moderate: 8 blocks of 3 MB, 8 rows of 128 bytes": ((8, 256, 8, 128), (11, 3)),
}
SHORT_SIZES = {"short": ((2, 16, 2, 8), (2, 1))}
CLIPPING = {"plain": None, "clipping": CLIP_NORM}


def loops(task: Task, style: str, strategy: unitrain.Strategy) -> dict[str, Loop]:
    """Return the loops of the frameworks that run in this world."""
    hand: Callable[[Task, str], Loop] = getattr(by_hand, style)
    made = {BASE: hand(task, strategy.config.backend), CONTROL: hand(task, strategy.config.backend)}
    made[OURS] = getattr(ours, style)(task, strategy)
    from loops import ignite

    made["Ignite"] = getattr(ignite, style)(task)
    if strategy.config.backend != "horovod":
        from loops import accelerate, fabric

        made["Accelerate"] = getattr(accelerate, style)(task)
        made["Fabric"] = getattr(fabric, style)(task, strategy.world_size)
    return made


def measure_world(style: str, tasks: list[str], lengths: tuple[int, int] | None = None) -> Found | None:
    """Measure all loops of a style in this process's world. ``lengths`` are the rounds, and the steps per round."""
    settings: dict[str, Any] = ours.FULL_SETTINGS if style == "full" else {}
    found = {}
    for name in tasks:
        with unitrain.init(device="cpu", **settings) as strategy:
            torch.set_num_threads(1)
            clock = time.thread_time if strategy.world_size == 1 else time.perf_counter
            rounds, steps = LENGTHS[name][strategy.world_size > 1] if lengths is None else lengths
            steps = max(1, steps // ACCUMULATE) if style == "full" else steps
            made = loops(getattr(workloads, name)(strategy.rank), style, strategy)
            ways = {label: partial(loop.run, steps) for label, loop in made.items()}
            seconds = alternate(ways, rounds, before=strategy.barrier, clock=clock)
            found[name] = compared(seconds, BASE, steps)
            for label, loop in made.items():
                found[name][label]["weights_bit_equal"] = bit_equal(made[BASE].model, loop.model)
    return found if strategy.is_main else None


def measure_sharded(size: tuple[int, int, int, int], style: str, rounds: int, steps: int) -> Found | None:
    """Measure the loops with sharded weights, and DDP, in this process's world."""
    from loops import accelerate

    clip_norm = CLIPPING[style]
    with unitrain.init(backend="fsdp", device="cpu", clip_norm=clip_norm) as strategy:
        torch.set_num_threads(1)
        task = transformer(strategy.rank, *size)
        made = {
            FSDP: by_hand.sharded(task, clip_norm),
            FSDP_AGAIN: by_hand.sharded(task, clip_norm),
            OURS: ours.plain(task, strategy),
            "Accelerate": accelerate.sharded(task, "Block", clip_norm),
            DDP: by_hand.replicated(task, clip_norm),
        }
        ways = {name: partial(loop.run, steps) for name, loop in made.items()}
        found: Found = compared(alternate(ways, rounds, before=strategy.barrier), FSDP, steps)
        expected = whole_weights(strategy, made[FSDP].model)
        for name, loop in made.items():
            weights = whole_weights(strategy, loop.model)
            found[name]["weights_differ_by"] = max(
                float((one - other).abs().max()) for one, other in zip(expected, weights, strict=True)
            )
        return found if strategy.is_main else None


def whole_weights(strategy: unitrain.Strategy, model: nn.Module) -> list[Tensor]:
    return [strategy.full_tensor(parameter.detach()) for parameter in model.parameters()]


def measure(short: bool) -> Found:
    every = [(world, style) for world in startable(*WORLDS) for style in STYLES]
    cases, sharded = [], []
    for world, style in [one for one in every if one in SHORT_CASES] if short else every:
        how = {"tasks": ["mlp"], "lengths": SHORT} if short else {"tasks": list(LENGTHS)}
        found = in_processes(world, measure_world, style=style, **how)
        cases += [{"world": world, "style": style, "task": task, "loops": its} for task, its in found.items()]
    for world in startable(GLOO):
        for name, (size, (rounds, steps)) in (SHORT_SIZES if short else SIZES).items():
            for style in CLIPPING:
                its = in_processes(world, measure_sharded, size=size, style=style, rounds=rounds, steps=steps)
                sharded.append({"world": world, "size": name, "style": style, "loops": its})
    return {"cases": cases, "sharded": sharded}


def tables(found: Found) -> str:
    parts = []
    for key, title in TITLES.items():
        cases = [case for case in found["cases"] if (case["task"], case["style"]) == key]
        if cases:
            shown = ratios("world", ((world_name(case["world"]), case["loops"]) for case in cases), BASE, CONTROL, "µs")
            parts.append(f"**{title}**\n\n{shown}")
    shown = ratios(
        "transformer", ((f"{one['size']}; {one['style']}", one["loops"]) for one in found["sharded"]), FSDP, FSDP_AGAIN
    )
    parts.append(f"**Sharded weights, 2 x gloo (torchrun)**\n\n{shown}")
    equal = all(one["weights_bit_equal"] for case in found["cases"] for one in case["loops"].values())
    furthest = max(one["weights_differ_by"] for case in found["sharded"] for one in case["loops"].values())
    parts.append(
        f"Weights of the first four tables: {'bit-equal in all loops' if equal else 'DIFFERENT'}; of the last, they "
        f"differ by at most {furthest:.0e} (with clipping). Accelerate and Fabric do not run on Horovod."
    )
    return "\n".join(parts)


if __name__ == "__main__":
    run(measure, tables)
