"""Copies of the state in memory outlive the processes, where no survivor can save the last step."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import unitrain
from unitrain.checkpoint.sharded.saving import Portion
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Draft
from unitrain.errors import UnitrainError
from unitrain.features.memory_copies import memory_store
from unitrain.features.memory_copies.copies import MemoryCopies, steps_between
from unitrain.features.memory_copies.memory_store import MemoryStore

STEPS, STEPS_PER_EPOCH, EVERY = 12, 3, 3
ALL = -1
Fault = tuple[int, str, int]
"""The rank that fails, where, and after which step."""
Course = tuple[int, dict[str, Any], torch.Tensor]
"""The first step, what was seen, and the final state."""
KINDS: dict[str, dict[str, Any]] = {
    "fsdp": {"backend": "fsdp"},
    "zero": {"backend": "ddp", "shard_optimizer": True},
    "ddp": {"backend": "ddp"},
}


def copies_of(folder: Path, every: Any) -> dict[str, Any]:
    return {"memory_copies": {"every": every, "folder": str(folder / "memory")}}


def train(
    folder: Path, fault: Fault | None, settings: dict[str, Any], resumes: Any = True, how: str = "kill"
) -> Course:
    """Train a model with buffers, a scheduler and dicts that change before the step, up to the end or a failure."""
    settings = {**copies_of(folder, EVERY), "sync_batchnorm": True, **settings}
    every = settings["memory_copies"]["every"]
    with unitrain.init(precision="fp64", device="cpu", timeout_s=30, **settings) as strategy:

        def come_to(place: str) -> None:
            if fault is None or fault[1:] != (place, strategy.global_step) or fault[0] not in (strategy.rank, ALL):
                return
            if how == "raise":
                raise ValueError("an error of a rank")
            if every not in (0, 1):  # it is written beside the training
                last = 1 if every == "auto" else strategy.global_step // every * every
                while last and not list(folder.glob(f"memory/**/step-{last:010d}.*/rank-0.json")):
                    time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        torch.manual_seed(0)
        layers = nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        optimizer = torch.optim.Adam((model := nn.Sequential(*layers)).parameters(), lr=0.05)
        model, optimizer, scheduler = strategy.prepare(model, optimizer, StepLR(optimizer, step_size=4, gamma=0.8))
        optimizer.register_step_post_hook(lambda *_: come_to("changed weights"))
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(*torch.split(torch.randn(22, 4, generator=generator).double(), [3, 1], 1))
        loader = strategy.dataloader(data, global_batch_size=8, shuffle=True)
        seen: dict[str, Any] = {"batches": 0, "steps": [], "epochs": {}}
        objects: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": loader,
            "seen": seen,
        }
        checkpoint = strategy.checkpoint(folder / "run", **objects)
        if resumes == "discard":
            checkpoint.discard()
        else:
            checkpoint.resume(None if resumes is True else resumes)
        first = strategy.global_step
        if resumes is True and strategy.is_main and first >= 4:
            assert checkpoint._writer.best == 4, "as the folder's newest says"
        for epoch in loader.epochs(STEPS // STEPS_PER_EPOCH):
            for inputs, targets in loader:
                seen["batches"] += 1
                seen["steps"].append(strategy.global_step)
                come_to("batch")
                loss = mse_loss(model(inputs), targets)
                come_to("forward")
                strategy.step(loss, optimizer, scheduler)
                time.sleep(0.03 if every == EVERY else 0)  # until a copy is written
                come_to("update")
                if strategy.global_step == 4:
                    checkpoint.save(best=True)
                    checkpoint.wait()
            with strategy.evaluation(model):
                come_to("evaluation")
                strategy.barrier()
            seen["epochs"][str(epoch)] = strategy.global_step
        state = [*map(strategy.full_tensor, (p.detach() for p in model.parameters())), *model.buffers()]
        state.append(torch.tensor(scheduler.get_last_lr()))
        return first, seen, torch.cat([value.double().flatten() for value in state])


def fail(folder: Path, fault: Fault, settings: dict[str, Any], resumes: Any = True, how: str = "kill") -> None:
    with pytest.raises((UnitrainError, ValueError)):
        run_ranks(train, folder, fault, settings, resumes, how)


def copies(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.glob("memory/unitrain-*/*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Course:
    settings = {**KINDS["ddp"], "memory_copies": {"every": 0}}
    course: Course = run_ranks(train, tmp_path_factory.mktemp("undisturbed"), None, settings)[0]
    return course


def assert_as(undisturbed: Course, found: Course) -> None:
    assert found[1] == undisturbed[1], "each batch once, and no epoch's end left out"
    torch.testing.assert_close(found[2], undisturbed[2], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("fault", "step", "how"),
    [
        ((1, "forward", 7), 7, "kill"),
        ((0, "batch", 9), 9, "kill"),  # rank 0 has the hub, and writes the copies
        ((1, "changed weights", 10), 10, "kill"),
        *(
            pytest.param(*other, marks=pytest.mark.all("another moment"))
            for other in (
                ((1, "update", 8), 7, "raise"),
                ((0, "update", 4), 3, "kill"),  # the other one waits for it in save()
                ((1, "evaluation", 9), 8, "kill"),  # it is begun again with the epoch's last batch
                ((ALL, "batch", 7), 7, "raise"),
            )
        ),
    ],
)
def test_with_a_copy_of_each_step_a_failure_costs_at_most_one(
    fault: Fault, step: int, how: str, tmp_path: Path, undisturbed: Course
) -> None:
    settings = {**KINDS["ddp"], **copies_of(tmp_path, 1)}
    fail(tmp_path, fault, settings, how=how)
    again = run_ranks(train, tmp_path, None, settings)[0]
    assert again[0] == step
    assert_as(undisturbed, again)


@pytest.mark.parametrize(("every", "at", "steps"), [("auto", 3, [1]), (2, 5, [2, 4]), (0, 5, [])])
def test_a_crash_costs_the_steps_since_the_last_copy(every: Any, at: int, steps: list[int], tmp_path: Path) -> None:
    settings = {**KINDS["ddp"], **copies_of(tmp_path, every)}
    fail(tmp_path, (1, "forward", at), settings)
    assert copies(tmp_path) == [f"step-{step:010d}.1" for step in steps]
    assert run_ranks(train, tmp_path, None, settings)[0][0] == max(steps, default=4), (
        "or since the checkpoint of step 4"
    )
    assert copies(tmp_path) == [], "a clean end removes them"


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        ("fsdp", 0),
        *(pytest.param(k, r, marks=pytest.mark.soak) for k in KINDS for r in (0, 1) if (k, r) != ("fsdp", 0)),
    ],
)
def test_a_killed_rank(
    kind: str, rank: int, tmp_path: Path, undisturbed: Course, capfd: pytest.CaptureFixture[str]
) -> None:
    fail(tmp_path, (rank, "update", 8), KINDS[kind])
    assert copies(tmp_path) == ["step-0000000003.1", "step-0000000006.1"]
    assert os.listdir(tmp_path / "memory")[0].startswith(f"unitrain-{os.getuid()}-")
    found, _ = run_ranks(train, tmp_path, None, KINDS[kind])
    assert found[0] == 6
    assert_as(undisturbed, found)
    said = "".join(capfd.readouterr())
    assert re.search(r"resumed after step 6, from \S+/step-0000000006\.1, in the memory of \S+: 2 steps after", said)


ZERO = KINDS["zero"]


def test_what_is_not_of_this_run_is_left(tmp_path: Path, undisturbed: Course) -> None:
    """The checkpoint that somebody names wins, and so does what comes after it. A new run begins anew."""
    fail(tmp_path, (1, "update", 8), ZERO)
    older = str(tmp_path / "run" / "step-0000000004")
    fail(tmp_path, (1, "update", 5), ZERO, older)
    assert copies(tmp_path) == ["step-0000000003.1", "step-0000000006.1"], "of before: there was no copy yet"
    fail(tmp_path, (1, "update", 7), ZERO, older)
    assert copies(tmp_path) == ["step-0000000006.3"]
    shutil.rmtree(tmp_path / "run" / "step-0000000004")
    fail(tmp_path, (1, "update", 2), ZERO)
    assert copies(tmp_path) == ["step-0000000006.3"], "it began anew: the checkpoint that it came after was removed"

    shutil.rmtree(tmp_path / "run")
    found, _ = run_ranks(train, tmp_path, None, ZERO)
    assert found[0] == 0, "the folder was emptied"
    assert_as(undisturbed, found)


@pytest.mark.soak
def test_a_copy_of_a_run_that_was_discarded(tmp_path: Path) -> None:
    fail(tmp_path, (1, "update", 8), ZERO)
    fail(tmp_path, (1, "update", 2), ZERO, "discard")
    assert run_ranks(train, tmp_path, None, ZERO)[0][0] == 0


@pytest.mark.soak
@pytest.mark.parametrize(("name", "said"), [("__1_0.distcp", "XXH3-128"), ("loader.pt", ""), ("rank-1.json", "")])
def test_one_that_is_damaged_or_incomplete_is_left_for_the_one_before(
    name: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fail(tmp_path, (1, "update", 4), {**ZERO, **copies_of(tmp_path, 1)})
    before, newest = copies(tmp_path)[-2:]
    [damaged] = tmp_path.glob(f"memory/*/{newest}/{name}")
    if name == "__1_0.distcp":
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    else:
        damaged.unlink()
    assert run_ranks(train, tmp_path, None, ZERO)[0][0] == int(before.split("-")[1].split(".")[0])
    assert said in "".join(capfd.readouterr())


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_on_another_number_of_ranks(kind: str, ranks: int, tmp_path: Path) -> None:
    fail(tmp_path, (0, "update", 8), KINDS[kind])
    settings = {**KINDS[kind], **({"backend": "single"} if ranks == 1 else {})}
    first, seen, _ = run_ranks(train, tmp_path, None, settings, nprocs=ranks)[0]
    assert (first, seen["steps"]) == (6, list(range(STEPS)))


def train_on_hosts(folder: Path, fault: Fault | None, settings: dict[str, Any]) -> Course:
    """Train, as if each rank was on a host of its own."""
    rank = os.environ["RANK"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory_store, "_SHM", folder / "memory" / rank)
        patched.setattr(socket, "gethostname", lambda: f"host{rank}")
        (folder / "memory" / rank).mkdir(parents=True, exist_ok=True)
        return train(folder, fault, {"memory_copies": {"every": EVERY}, **settings})


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("zero", 1),
        *(pytest.param(k, h, marks=pytest.mark.soak) for k in KINDS for h in (0, 1) if (k, h) != ("zero", 1)),
    ],
)
def test_a_lost_host(
    kind: str, lost: int, tmp_path: Path, undisturbed: Course, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other one has what was in its memory, and gives it to the host that comes in its place."""
    with pytest.raises(UnitrainError):
        run_ranks(train_on_hosts, tmp_path, (lost, "update", 8), KINDS[kind])
    shutil.rmtree(tmp_path / "memory" / str(lost))
    found, _ = run_ranks(train_on_hosts, tmp_path, None, KINDS[kind])
    assert found[0] == 6
    assert_as(undisturbed, found)
    assert f"in the memory of host{1 - lost}: 2 steps" in "".join(capfd.readouterr())
    assert list((tmp_path / "memory").glob("*/*")) == []


def train_without_room(folder: Path, how: str) -> Course:
    """Train where there is too little memory, from the beginning or later."""
    with pytest.MonkeyPatch.context() as patched:
        if how == "little":
            patched.setattr(MemoryStore, "room", lambda self: 4000)
        else:
            begun: list[str] = []

            def write(draft: Draft, parts: dict[str, Any]) -> dict[str, Any]:
                begun.append(draft.name)
                if len(begun) > 1 and isinstance(draft.store, Disk) and "memory" in str(draft.store.root):
                    raise OSError(errno.ENOSPC, "full")
                return written(draft, parts)

            written = Draft.write
            patched.setattr(Draft, "write", write)
        return train(folder, None, ZERO)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["little", "full"])
def test_without_room_training_goes_on(
    how: str, tmp_path: Path, undisturbed: Course, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_as(undisturbed, run_ranks(train_without_room, tmp_path, how)[0])
    said = "".join(capfd.readouterr())
    why = r"would keep \d+ bytes, and several copies, where 4000 are free" if how == "little" else "full in "
    assert len(re.findall(rf"no more copies of the state in memory: .*{why}", said)) == 1, said


def test_others_may_not_use_the_folder(tmp_path: Path) -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        store = MemoryStore(strategy.communicator, "a run", str(tmp_path))
        assert (store.why, store.disk.root.stat().st_mode & 0o777) == ("", 0o700)
        store.disk.root.chmod(0o755)
        assert "is not a folder of this user only" in MemoryStore(strategy.communicator, "a run", str(tmp_path)).why


@pytest.mark.parametrize(("shares", "every"), [(1e-4, 1), (0.01, 1), (0.05, 5), (0.5, 50)])
def test_copies_take_a_hundredth_of_the_time(shares: float, every: int) -> None:
    assert steps_between(shares) == every


def test_setting_up_is_no_cost_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal, copy = MemoryCopies._refusal, MemoryCopies._copy
    begun: list[int] = []

    def slow(self: MemoryCopies, portion: Portion) -> str:
        time.sleep(0.5)
        return refusal(self, portion)

    def noted(self: MemoryCopies) -> None:
        begun.append(self._pulse.step)
        copy(self)

    monkeypatch.setattr(MemoryCopies, "_refusal", slow)
    monkeypatch.setattr(MemoryCopies, "_copy", noted)
    start(tmp_path / "run", tmp_path / "memory", every="auto", steps=22)
    assert begun == [1, 11, 21]


def start(run: Path, memory: Path, *, every: int | str = 1, steps: int = 0, width: int = 1, saves: int = 0) -> int:
    """Start a run in one process, and return the step that it resumes after. With ``steps``, it trains, and crashes."""
    settings: dict[str, Any] = {"memory_copies": {"every": every, "folder": str(memory)}}
    with suppress(ZeroDivisionError), unitrain.init(backend="single", device="cpu", **settings) as strategy:
        module = nn.Linear(2, width)
        model, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        checkpoint = strategy.checkpoint(run, model=model, optimizer=optimizer)
        checkpoint.resume()
        first = strategy.global_step
        while strategy.global_step < steps:
            strategy.step(model(torch.ones(1, 2)).sum(), optimizer)
            if strategy.global_step == saves:
                shutil.rmtree(run)
                checkpoint.save()
                checkpoint.wait()
        if steps:
            raise ZeroDivisionError
    return first


def spoil(memory: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    for path in memory.glob(f"*/*/{name}"):
        path.write_bytes(change(path.read_bytes()))


def note(**odd: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), **odd}).encode()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("model.pt", lambda content: content[:-1] + b"x", "skipping a damaged checkpoint: .*model.pt: its XXH3-128"),
        ("model.pt", lambda content: content[:-1], "rank-0.json: model.pt has another size"),
        ("rank-0.json", lambda content: content[:-9], "rank-0.json: Invalid JSON"),
        ("rank-0.json", lambda content: b"[]", "rank-0.json: Input should be an object"),
        ("rank-0.json", note(saved="x"), "rank-0.json: saved: .*valid integer"),
        ("rank-0.json", note(pieces=[1]), "skipping the copy .*TypeError"),
        ("rank-0.json", note(about={}), "skipping the copy .*strategy: Field required"),
        ("rank-0.json", note(writers=2), "there are those of rank 0 only"),
        ("rank-0.json", note(saved=9), "the checkpoint of step 9, which it follows, was removed"),
        ("rank-0.json", note(run="x"), "has copies of another run in memory, up to step-0000000002.1"),
    ],
)
def test_copies_that_can_not_be_used_are_named_and_the_job_begins(
    name: str, change: Callable[[bytes], bytes], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", tmp_path / "memory", steps=2)
    spoil(tmp_path / "memory", name, change)
    assert start(tmp_path / "run", tmp_path / "memory") == 0
    assert re.search(said, capsys.readouterr().err)


def test_a_copy_of_another_model_is_named_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path / "run", tmp_path / "memory", steps=2)
    assert start(tmp_path / "run", tmp_path / "memory", width=3) == 0
    said = r"does not fit this run: \S+/step-0000000002\.1: the checkpoint belongs to another model: "
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(("folder", "memory"), [("moved", "memory"), ("run", "other")])
def test_copies_are_named_if_the_run_s_folder_or_theirs_is_another(
    folder: str, memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", tmp_path / "memory", steps=2)
    (tmp_path / "run").rename(tmp_path / folder)
    assert start(tmp_path / folder, tmp_path / memory) == 0
    said = r"copies in memory in \S+/memory/unitrain-\S+ are not used: .* start the run with what it was"
    assert re.search(said, capsys.readouterr().err)
    (tmp_path / folder).rename(tmp_path / "run")
    assert start(tmp_path / "run", tmp_path / "memory") == 2


def test_a_folder_that_was_removed_in_the_run_costs_no_copies(tmp_path: Path) -> None:
    start(tmp_path / "run", tmp_path / "memory", steps=5, saves=3)
    assert start(tmp_path / "run", tmp_path / "memory") == 5
