"""The time of a step with sharded weights: the backend fsdp, FSDP2 by hand and with Accelerate, and DDP.

    python benchmarks/sharded_step.py

A transformer on two processes, whose blocks are gathered one at a time. All loops run in the same processes, in turns.
By hand is torch's ``fully_shard`` with its default options, and takes part twice, which shows the spread. UniTrain does
more: it finds gradients that are not finite. Final weights must be equal bit for bit; with clipping they differ by
rounding, since UniTrain's norm and that of DDP are not summed as that of FSDP2.

DDP is what a model that fits into memory is trained with.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

import unitrain
from loops import CLIP_NORM, Loop, accelerate, by_hand, ours
from shared.processes import GLOO, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.rounds import alternate, compared, shown_ratio, slower_beyond_spread
from shared.workloads import TextTask, transformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE, CONTROL, OURS, ACCELERATE, DDP = "FSDP2 by hand", "FSDP2 by hand, again", "UniTrain", "Accelerate", "DDP by hand"
# For each size, the layers, the width, the rows and the length of a batch, then the rounds and the steps in each.
SIZES = {
    "small: 4 blocks of 0.2 MB, 4 rows of 32 bytes": ((4, 64, 4, 32), (15, 10)),
    "moderate: 8 blocks of 3 MB, 8 rows of 128 bytes": ((8, 256, 8, 128), (11, 3)),
}
SHORT = {"short": ((2, 16, 2, 8), (2, 1))}
CLIPPING = {"plain": None, "clipping": CLIP_NORM}


def loops(task: TextTask, clip_norm: float | None, strategy: unitrain.Strategy) -> dict[str, Loop]:
    return {
        BASE: by_hand.sharded(task, clip_norm),
        CONTROL: by_hand.sharded(task, clip_norm),
        OURS: ours.plain(task, strategy),
        ACCELERATE: accelerate.sharded(task, "Block", clip_norm),
        DDP: by_hand.replicated(task, clip_norm),
    }


def measure_case(size: tuple[int, int, int, int], style: str, rounds: int, steps: int) -> Found | None:
    """Measure each way in this process's world."""
    clip_norm = CLIPPING[style]
    with unitrain.init(backend="fsdp", device="cpu", threads_per_process=1, clip_norm=clip_norm) as strategy:
        made = loops(transformer(strategy.rank, *size), clip_norm, strategy)
        ways = {name: partial(loop.run, steps) for name, loop in made.items()}
        found: Found = compared(alternate(ways, rounds, before=strategy.barrier), BASE, steps)
        expected = whole_weights(strategy, made[BASE].model)
        for name, loop in made.items():
            weights = whole_weights(strategy, loop.model)
            found[name]["weights_differ_by"] = max(
                float((one - other).abs().max()) for one, other in zip(expected, weights, strict=True)
            )
        return found if strategy.is_main else None


def whole_weights(strategy: unitrain.Strategy, model: nn.Module) -> list[Tensor]:
    return [strategy.full_tensor(parameter.detach()) for parameter in model.parameters()]


def measure(short: bool) -> Found:
    cases = []
    for world in startable(GLOO):
        for name, (size, (rounds, steps)) in (SHORT if short else SIZES).items():
            for style in CLIPPING:
                found = in_processes(world, measure_case, size=size, style=style, rounds=rounds, steps=steps)
                cases.append({"world": world, "size": name, "style": style, "loops": found})
    return {"cases": cases}


def tables(found: Found) -> str:
    parts = []
    for case in found["cases"]:
        rows = []
        for name, one in case["loops"].items():
            slower = "" if name in (BASE, CONTROL) else slower_beyond_spread(one, case["loops"][CONTROL])
            rows.append(
                [
                    name, f"{one['seconds'] * 1e3:.2f}", f"{one['over_s'] * 1e3:+.2f}", shown_ratio(one),
                    {"": "", True: "yes", False: "no"}[slower],
                    f"differ by {one['weights_differ_by']:.0e}" if one["weights_differ_by"] else "bit-equal",
                ]
            )  # fmt: skip
        head = ["loop", "ms a step", "over by hand, ms", "ratio (quartiles)", "slower", "weights"]
        parts.append(f"**{case['size']}; {case['style']}; {world_name(case['world'])}**\n\n{table(head, rows)}")
    kept = all(not slower_beyond_spread(case["loops"][OURS], case["loops"][CONTROL]) for case in found["cases"])
    parts.append(f"UniTrain may not be slower than FSDP2 by hand beyond the spread: {'kept' if kept else 'NOT KEPT'}.")
    return "\n".join(parts)


def plot(found: Found, figure: Figure) -> None:
    figure.set_size_inches(12, 4.5)
    axis = figure.subplots()
    names = [OURS, ACCELERATE, DDP, CONTROL]
    for i, name in enumerate(names):
        ones = [case["loops"][name] for case in found["cases"]]
        spread = [
            [max(0, one["ratio"] - one["ratio_quartiles"][0]) for one in ones],
            [max(0, one["ratio_quartiles"][1] - one["ratio"]) for one in ones],
        ]
        places = [place + 0.2 * (i - 1.5) for place in range(len(ones))]
        axis.bar(places, [one["ratio"] for one in ones], 0.19, yerr=spread, label=name)
    axis.axhline(1, color="black", linewidth=0.8)
    titles = [f"{case['size'].partition(':')[0]}, {case['style']}" for case in found["cases"]]
    axis.set_xticks(range(len(titles)), titles)
    axis.set_ylabel("time of a step / FSDP2 by hand")
    axis.legend()


if __name__ == "__main__":
    run(measure, tables, plot)
