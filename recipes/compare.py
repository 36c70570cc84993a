r"""Train the ResNet recipe in ways that are often compared, and draw what comes of it.

    python recipes/compare.py
    python recipes/compare.py --only batch-norm --seeds 1 2 3 --flags --data imagefolder:flowers --model resnet50

Each comparison is a diagram of the validation accuracy by epoch, the mean and the range of several seeds, and a table
that has the images per second, too. Runs start one after another, with torchrun where they have several processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

RECIPE = Path(__file__).with_name("resnet.py")


class Way(NamedTuple):
    """One way to train.

    Attributes:
        processes: number of processes; torchrun starts them if there are several.
        flags: the flags of the recipe.
    """

    processes: int
    flags: tuple[str, ...] = ()


def comparisons(batch: int, lr: float) -> dict[str, dict[str, Way]]:
    """Return the ways to train by comparison and name, around a global batch size and its learning rate."""
    gpus = torch.cuda.device_count()
    many, few = ("--batch-size", str(batch)), ("--batch-size", str(max(4, batch // 4)))
    one_gpu = ("--strategy.backend", "single")
    large = ("--batch-size", str(4 * batch), "--lr-reference-batch", str(batch))
    synced = ("--strategy.sync-batchnorm", "true")
    by_hand = {"DataParallel": Way(1, ("--strategy.backend", "data_parallel", *many))} if gpus > 1 else {}
    return {
        # With few images per process, each process's statistics are poor.
        "batch-norm": {
            "1 process": Way(1, (*few, *one_gpu)),
            "4 processes": Way(4, few),
            "4 processes, SyncBN": Way(4, (*few, *synced)),
        },
        "convergence": {
            "one device": Way(1, (*many, *one_gpu)),
            **by_hand,
            "2 processes": Way(2, (*many, *synced)),
            "4 processes": Way(4, (*many, *synced)),
        },
        # BatchNorm sees micro-batches in the one, and each process's part in the other.
        "accumulation": {
            "1 process": Way(1, (*many, *one_gpu)),
            "1 process, accumulate 4": Way(1, (*many, *one_gpu, "--strategy.accumulate", "4")),
            "4 processes": Way(4, many),
        },
        "batch-size": {
            f"batch {batch}, lr {lr:g}": Way(1, (*many, *one_gpu)),
            f"batch {4 * batch}, lr {lr:g}": Way(1, (*large, *one_gpu)),
            f"batch {4 * batch}, linear: lr {4 * lr:g}": Way(1, (*large, *one_gpu, "--lr-scaling", "linear")),
        },
    }


def train(way: Way, folder: Path, flags: list[str]) -> list[dict[str, float]]:
    """Train in one way, unless it was done before, and return the metrics of each epoch."""
    launcher = [sys.executable]
    if way.processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launcher += ["--nproc-per-node", str(way.processes)]
    command = [*launcher, str(RECIPE), *way.flags, *flags, "--output-dir", str(folder)]
    print(" ".join(command), flush=True)
    if not (folder / "model.pt").exists():
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"{run.stderr}\ncompare.py: the run above failed with exit code {run.returncode}.")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Train in all ways with all seeds, and write a figure and a table of each comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=comparisons(1, 1), help="the comparisons to make; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run for each; default: 0 1 2")
    parser.add_argument("--batch-size", type=int, default=64, help="global batch size; default: 64")
    parser.add_argument("--lr", type=float, default=0.1, help="its learning rate; default: 0.1")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of each run; default: 10")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/compare"), help="default: runs/compare")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="other flags of the recipe, at the end")
    given = parser.parse_args()
    flags = ["--epochs", str(given.epochs), "--lr", str(given.lr), *given.flags]
    chosen = {
        name: ways for name, ways in comparisons(given.batch_size, given.lr).items() if name in (given.only or name)
    }
    table = ["| comparison | way | accuracy (range) | loss | images/s |", "|---|---|---|---|---|"]
    columns = min(2, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = Figure(figsize=(5 * columns, 3.5 * rows), layout="constrained")
    for axis, (name, ways) in zip(figure.subplots(rows, columns, squeeze=False).flat, chosen.items(), strict=False):
        for label, way in ways.items():
            folders = [given.output_dir / name / label.replace(" ", "-") / str(seed) for seed in given.seeds]
            runs = [
                train(way, folder, [*flags, "--strategy.seed", str(seed)])
                for folder, seed in zip(folders, given.seeds, strict=True)
            ]
            by_epoch = list(zip(*([line["val_accuracy"] for line in run] for run in runs), strict=True))
            epochs = range(1, len(by_epoch) + 1)
            axis.plot(epochs, [statistics.mean(one) for one in by_epoch], label=label, marker=".")
            axis.fill_between(epochs, list(map(min, by_epoch)), list(map(max, by_epoch)), alpha=0.2)
            loss = statistics.mean(run[-1]["val_loss"] for run in runs)
            speed = statistics.median(line["samples_per_second"] for run in runs for line in run[1:] or run)
            last = by_epoch[-1]
            table.append(
                f"| {name} | {label} | {statistics.mean(last):.2%} ({min(last):.2%} to {max(last):.2%}) | {loss:.4f} | "
                f"{speed:,.0f} |"
            )
        axis.set(title=name, xlabel="epoch", ylabel="validation accuracy")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(given.output_dir / "compare.png", dpi=80)
    (given.output_dir / "compare.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    print("\n".join(table), f"\nresults are in {given.output_dir}")


if __name__ == "__main__":
    main()
