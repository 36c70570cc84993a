"""What large jobs cost, piece by piece: by the number of ranks, of tensors, of pieces in a checkpoint, and of samples.

One process is a rank of a job. All ranks send what it sends, so the network costs nothing, and what is measured is all
that a rank does with it: the CPU time and the increase of peak memory, of each case in a process of its own, and the
bytes that the rank receives or reads. The growth is the exponent by which costs grow with the size, beside a constant;
the last column follows from it.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from loading import batches
from torch import Tensor

from shared.members import HEARTBEAT_TIMEOUT_S, TIMEOUT_S, members
from shared.report import Found, table
from shared.workloads import OnlyParameters
from unitrain.checkpoint.contents import RunPart
from unitrain.checkpoint.names import names_of
from unitrain.checkpoint.sharded.dcp import METADATA, Piece, from_bytes
from unitrain.checkpoint.sharded.saving import NOTE, awaited_note, joined_files
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Draft
from unitrain.checkpoint.store.located import RUN, locate
from unitrain.checkpoint.writer import snapshot
from unitrain.communication import plain_data
from unitrain.communication.backend import LocalBackend
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import outline
from unitrain.config import StrategyConfig
from unitrain.job.joining.handshake import handshake
from unitrain.job.watch.hub import Hub
from unitrain.job.watch.messages import BoundaryRequest, Heartbeat, NextBoundary, RequestStop
from unitrain.launch.detect import Launch
from unitrain.training.models.in_sync import check_models
from unitrain.training.state_parts import States

RANKS = (100, 1000, 10_000, 100_000)
TENSORS = (100, 1000, 10_000, 1_000_000)
PIECES = (10_000, 50_000, 250_000, 10_000_000)  # 1,000 tensors of 10,000 ranks
SAMPLES = (10**6, 10**8, 10**10, 10**12)
TENSORS_OF_PIECES = 25
received: list[int] = []  # the bytes of each collective and file

Action = Callable[[], object]


class Alike(LocalBackend):
    """The backend of a rank in a job of ranks that send what it sends."""

    name = "single"

    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Return this rank's tensor for each rank."""
        received.append(tensor.nbytes * self.world_size)
        return lambda: tensor.unsqueeze(0).repeat(self.world_size, *[1] * tensor.dim())


def communicator_of(ranks: int) -> Communicator:
    """Return the communicator of rank 0."""
    backend = Alike(StrategyConfig(), Launch("python"), torch.device("cpu"))
    backend.world_size = ranks
    return Communicator(backend)


def meet(ranks: int, folder: Path) -> Action:
    """Compare settings, versions and code, and exchange hosts and pids."""
    return lambda: handshake(communicator_of(ranks), StrategyConfig(), Alike)


def gather(ranks: int, folder: Path) -> Action:
    """Gather an object: a loss, a name and a few numbers."""
    value = {"loss": 0.25, "name": "validation", "counts": [1, 2, 3]}
    return lambda: communicator_of(ranks).all_gather_object(value)


def hub_of(ranks: int) -> Hub:
    return Hub(
        members(ranks), timeout_s=TIMEOUT_S, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, send=lambda *_: None, now=0.0
    )


def watch(ranks: int, folder: Path) -> Action:
    """Take a heartbeat of each rank, and check all, without connections."""
    hub = hub_of(ranks)

    def beat() -> None:
        for rank in range(ranks):
            hub.receive(rank, Heartbeat("step", 5, 0.1, trained=(5, 0)), 1.0)
        hub.check(1.0)

    return beat


def stop(ranks: int, folder: Path) -> Action:
    """Agree on a boundary to stop at, without connections."""
    hub = hub_of(ranks)

    def agree() -> None:
        hub.receive(0, RequestStop(BoundaryRequest("signal", 15)), 1.0)
        for rank in range(ranks):
            hub.receive(rank, NextBoundary(rank % 3), 1.0)

    return agree


def run_part(ranks: int) -> RunPart:
    """Return the part of a checkpoint that has the random number generators of each rank."""
    step: Any = SimpleNamespace(global_step=7)
    ranks_of = communicator_of(ranks)
    return RunPart(ranks_of, ranks_of, step, States(), dict, {}, 0, lambda: None)


def generators(ranks: int, folder: Path) -> Action:
    """Gather the states of all ranks' random number generators, and copy them, as a save in the background does."""
    part = run_part(ranks)
    return lambda: snapshot(part.complete(part.state()))


def generators_written(ranks: int, folder: Path) -> Action:
    """Write these states, and read them with the outline that is sent to all ranks, on rank 0."""
    part = run_part(ranks)
    state = {RUN: part.complete(part.state())}

    def write() -> None:
        draft = Draft(Disk(folder), ".")
        draft.complete(7, {"strategy": {}, "config": {}}, draft.write(state))
        saved = torch.load(folder / f"{RUN}.pt", mmap=True)
        received.append(plain_data.encode(outline(saved)).nbytes)

    return write


def notes(ranks: int, folder: Path) -> Action:
    """Wait for the notes of all ranks in the folder of a checkpoint, write the manifest and read it."""
    draft = Draft(Disk(folder), ".")
    for rank in range(ranks):
        file = {f"__{rank}_0.distcp": {"size": 10**9, "xxh3": "0" * 32}}
        (folder / NOTE.format(rank)).write_text(json.dumps({"files": file, "pieces": []}))

    def join() -> None:
        files: dict[str, Any] = {}
        for rank in range(ranks):
            files |= awaited_note(draft, rank, 1.0)["files"]
            draft.store.remove(NOTE.format(rank))
        draft.complete(7, {"strategy": {}, "config": {}}, files)
        received.append(draft.store.size("manifest.json"))
        locate(draft.store, "")

    return join


def notes_of_pieces(pieces: int) -> list[str]:
    """Return the notes of ranks that each have rows of the same tensors, and as many pieces in all."""
    found, ranks = [], pieces // TENSORS_OF_PIECES
    for rank in range(ranks):
        shape, offsets, file = (8 * ranks, 64), (8 * rank, 0), f"__{rank}_0.distcp"
        written = [
            Piece(("model", f"blocks.{number}.weight"), "float32", shape, offsets, (8, 64), file, 4096 * number, 3200)
            for number in range(TENSORS_OF_PIECES)
        ]
        found.append(json.dumps({"files": {}, "pieces": written}))
    return found


def metadata(pieces: int, folder: Path) -> Action:
    """Join the ranks' notes to the metadata of a sharded checkpoint, on rank 0."""
    texts = notes_of_pieces(pieces)
    received.append(sum(map(len, texts)))
    return lambda: joined_files(Draft(Disk(folder), "."), map(json.loads, texts))


def metadata_read(pieces: int, folder: Path) -> Action:
    """Read the metadata, as each rank does that resumes."""
    process = multiprocessing.get_context("fork").Process(target=lambda: metadata(pieces, folder)())
    process.start()  # so that this one's memory stays small until then
    process.join()
    content = (folder / METADATA).read_bytes()
    received[:] = [len(content)]
    return lambda: from_bytes(content, "metadata")


def names(tensors: int, folder: Path) -> Action:
    """Compare the ranks' models, and name an optimizer's parameters, as each rank does at a save."""
    model = OnlyParameters([(1,)] * tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = communicator_of(2)

    def compare() -> None:
        check_models(ranks, model.named_parameters())
        received.append(len(json.dumps(names_of(optimizer, {"model": model}))))

    return compare


def order(samples: int, folder: Path) -> Action:
    """Seek in a shuffled epoch, and take a batch of it."""
    next(batches("unitrain", 1000, False))  # first calls
    return lambda: next(batches("unitrain", samples, True))


class Case(NamedTuple):
    """What is measured by size."""

    what: str
    unit: str
    sizes: tuple[int, ...]
    """The last one is not measured."""
    prepare: Callable[[int, Path], Action]


CASES = [
    Case("the handshake at the start", "ranks", RANKS, meet),
    Case("a gather of small objects", "ranks", RANKS, gather),
    Case("the hub: a heartbeat of each rank, and a check", "ranks", RANKS, watch),
    Case("the hub: to agree on a stop", "ranks", RANKS, stop),
    Case("a save: states of generators, gathered and copied", "ranks", RANKS, generators),
    Case("rank 0: these written, and read", "ranks", RANKS, generators_written),
    Case("rank 0: the ranks' notes, and the manifest", "ranks", RANKS, notes),
    Case("rank 0: the metadata of a sharded checkpoint", "pieces", PIECES, metadata),
    Case("a resume: these metadata, read by a rank", "pieces", PIECES, metadata_read),
    Case("names of parameters, compared and saved", "tensors", TENSORS, names),
    Case("a seek in a shuffled epoch, and a batch", "samples", SAMPLES, order),
]


def measured(case: Case, size: int) -> Found:
    """Measure a case in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=partial(_measure, case, size, theirs))
    process.start()
    theirs.close()
    found: Found = ours.recv()
    process.join()
    return found


def _measure(case: Case, size: int, parent: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        action = case.prepare(size, Path(folder))
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        action()
        seconds = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    parent.send({"size": size, "cpu_s": seconds, "peak_mb": peak / 1024, "bytes": sum(received)})


def measure_pieces(short: bool) -> list[Found]:
    """Measure all cases at three sizes each, which are smaller in a short run."""
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        *sizes, largest = case.sizes
        found = [measured(case, size // 10 if short else size) for size in sizes]
        growth, seconds = extrapolated([(one["size"], one["cpu_s"]) for one in found], largest)
        last = {"size": largest, "cpu_s": seconds}
        rows.append({"what": case.what, "unit": case.unit, "found": found, "growth": growth, "last": last})
    return rows


def extrapolated(points: list[tuple[int, float]], size: int) -> tuple[float, float]:
    """Return the exponent of the growth beside a constant, and the seconds at a size, given three of equal ratio."""
    (_, first), (middle, second), (largest, third) = points
    growth = math.log(max(third - second, 1e-6) / max(second - first, 1e-6)) / math.log(largest / middle)
    factor = (third - second) / (largest**growth - middle**growth) if growth else 0.0
    return growth, third + factor * (size**growth - largest**growth)


def pieces_table(cases: list[Found]) -> str:
    """Return a table of what ``measure_pieces`` has returned."""
    rows = []
    for case in cases:
        last, further = case["found"][-1], case["last"]
        rows.append(
            [
                case["what"],
                "; ".join(f"{_number(one['size'])}: {_number(one['cpu_s'])} s" for one in case["found"]),
                f"{last['peak_mb']:,.0f} MB",
                f"{last['bytes'] / 1e6:,.1f} MB",
                f"{case['growth']:.2f}",
                f"{_number(further['size'])} {case['unit']}: {_number(further['cpu_s'])} s",
            ]
        )
    return table(["", "CPU time by size", "memory", "received or read", "growth", "extrapolated"], rows)


def _number(value: float) -> str:
    return f"{value:.0e}" if value > 10**6 else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
