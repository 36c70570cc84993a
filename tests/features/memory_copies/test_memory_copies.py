"""Copies of the state in memory outlive the processes, where no survivor can save the last step."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import unitrain
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Draft
from unitrain.errors import UnitrainError
from unitrain.features.memory_copies import memory_store
from unitrain.features.memory_copies.copies import steps_between
from unitrain.features.memory_copies.memory_store import MemoryStore

STEPS, EVERY = 12, 3
KINDS: dict[str, dict[str, Any]] = {
    "fsdp": {"backend": "fsdp"},
    "zero": {"backend": "ddp", "shard_optimizer": True},
    "ddp": {"backend": "ddp"},
}


def train(folder: Path, killed: tuple[int, int] | None, settings: dict[str, Any], resumes: Any = True) -> Any:
    """Train to the end, or until a rank is killed after a step. Return the first step, and all weights."""
    settings = {"memory_copies": {"every": EVERY, "folder": str(folder / "memory")}, **settings}
    with unitrain.init(precision="fp64", device="cpu", timeout_s=30, **settings) as strategy:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        model, optimizer = strategy.prepare(model, optimizer)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(*torch.split(torch.randn(22, 4, generator=generator).double(), [3, 1], 1))
        loader = strategy.dataloader(data, global_batch_size=8, shuffle=True)
        seen: dict[str, Any] = {"steps": []}
        checkpoint = strategy.checkpoint(folder / "run", model=model, optimizer=optimizer, loader=loader, seen=seen)
        if resumes == "discard":
            checkpoint.discard()
        elif resumes:
            checkpoint.resume(None if resumes is True else resumes)
        first = strategy.global_step
        for _ in loader.epochs(STEPS // 3):
            for inputs, targets in loader:
                strategy.step(mse_loss(model(inputs), targets), optimizer)
                time.sleep(0.03)  # until a copy is written
                seen["steps"].append(strategy.global_step)
                if killed == (strategy.rank, strategy.global_step):
                    os.kill(os.getpid(), signal.SIGKILL)
                if strategy.global_step == 4:
                    checkpoint.save(best=True)
                    checkpoint.wait()
        return first, seen["steps"], torch.cat([strategy.full_tensor(p.detach()).flatten() for p in model.parameters()])


def fail(folder: Path, killed: tuple[int, int], settings: dict[str, Any], resumes: Any = True) -> None:
    with pytest.raises(UnitrainError):
        run_ranks(train, folder, killed, settings, resumes)


def copies(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.glob("memory/unitrain-*/*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    settings = {**KINDS["ddp"], "memory_copies": {"every": 0}}
    weights: torch.Tensor = run_ranks(train, tmp_path_factory.mktemp("undisturbed"), None, settings)[0][2]
    return weights


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        ("fsdp", 0),
        *(pytest.param(k, r, marks=pytest.mark.soak) for k in KINDS for r in (0, 1) if (k, r) != ("fsdp", 0)),
    ],
)
def test_a_killed_rank(
    kind: str, rank: int, tmp_path: Path, undisturbed: torch.Tensor, capfd: pytest.CaptureFixture[str]
) -> None:
    fail(tmp_path, (rank, 8), KINDS[kind])
    assert copies(tmp_path) == ["step-0000000003.1", "step-0000000006.1"]
    assert os.listdir(tmp_path / "memory")[0].startswith(f"unitrain-{os.getuid()}-")
    [(first, seen, weights), _] = run_ranks(train, tmp_path, None, KINDS[kind])
    assert first == 6
    assert seen == list(range(1, STEPS + 1))
    torch.testing.assert_close(weights, undisturbed, rtol=0, atol=1e-12)
    said = "".join(capfd.readouterr())
    assert re.search(r"resumed after step 6, from \S+/step-0000000006\.1, in the memory of \S+: 2 steps after", said)
    assert os.readlink(tmp_path / "run" / "best") == "step-0000000004", "which the folder's newest knows"
    assert copies(tmp_path) == [], "a clean end removes them"


ZERO = KINDS["zero"]


def test_what_is_not_of_this_run_is_left(tmp_path: Path, undisturbed: torch.Tensor) -> None:
    """The checkpoint that somebody names wins, and so does what comes after it. A new run begins anew."""
    fail(tmp_path, (1, 8), ZERO)
    older = str(tmp_path / "run" / "step-0000000004")
    fail(tmp_path, (1, 5), ZERO, older)
    assert copies(tmp_path) == ["step-0000000003.1", "step-0000000006.1"], "of before: there was no copy yet"
    fail(tmp_path, (1, 7), ZERO, older)
    assert copies(tmp_path) == ["step-0000000006.3"]
    shutil.rmtree(tmp_path / "run" / "step-0000000004")
    fail(tmp_path, (1, 2), ZERO)
    assert copies(tmp_path) == ["step-0000000006.3"], "it began anew: the checkpoint that it came after was removed"

    shutil.rmtree(tmp_path / "run")
    [(first, _, weights), _] = run_ranks(train, tmp_path, None, ZERO)
    assert first == 0, "the folder was emptied"
    torch.testing.assert_close(weights, undisturbed, rtol=0, atol=1e-12)


@pytest.mark.soak
def test_a_copy_of_a_run_that_was_discarded(tmp_path: Path) -> None:
    fail(tmp_path, (1, 8), ZERO)
    fail(tmp_path, (1, 2), ZERO, "discard")
    assert run_ranks(train, tmp_path, None, ZERO)[0][0] == 0


@pytest.mark.soak
@pytest.mark.parametrize(("name", "said"), [("__1_0.distcp", "SHA-256"), ("loader.pt", ""), ("rank-1.json", "")])
def test_one_that_is_damaged_or_incomplete_is_left_for_the_one_before(
    name: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fail(tmp_path, (1, 4), {**ZERO, "memory_copies": {"every": 1, "folder": str(tmp_path / "memory")}})
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
    fail(tmp_path, (0, 8), KINDS[kind])
    settings = {**KINDS[kind], **({"backend": "single"} if ranks == 1 else {})}
    first, seen, _ = run_ranks(train, tmp_path, None, settings, nprocs=ranks)[0]
    assert (first, seen) == (6, list(range(1, STEPS + 1)))


def train_on_hosts(folder: Path, killed: tuple[int, int] | None, settings: dict[str, Any]) -> Any:
    """Train, as if each rank was on a host of its own."""
    rank = os.environ["RANK"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory_store, "_SHM", folder / "memory" / rank)
        patched.setattr(socket, "gethostname", lambda: f"host{rank}")
        (folder / "memory" / rank).mkdir(parents=True, exist_ok=True)
        return train(folder, killed, {"memory_copies": {"every": EVERY}, **settings})


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("zero", 1),
        *(pytest.param(k, h, marks=pytest.mark.soak) for k in KINDS for h in (0, 1) if (k, h) != ("zero", 1)),
    ],
)
def test_a_lost_host(
    kind: str, lost: int, tmp_path: Path, undisturbed: torch.Tensor, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other one has what was in its memory, and gives it to the host that comes in its place."""
    with pytest.raises(UnitrainError):
        run_ranks(train_on_hosts, tmp_path, (lost, 8), KINDS[kind])
    shutil.rmtree(tmp_path / "memory" / str(lost))
    (first, seen, weights), _ = run_ranks(train_on_hosts, tmp_path, None, KINDS[kind])
    assert (first, seen) == (6, list(range(1, STEPS + 1)))
    torch.testing.assert_close(weights, undisturbed, rtol=0, atol=1e-12)
    assert f"in the memory of host{1 - lost}: 2 steps" in "".join(capfd.readouterr())
    assert list((tmp_path / "memory").glob("*/*")) == []


def train_without_room(folder: Path, how: str) -> Any:
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
    how: str, tmp_path: Path, undisturbed: torch.Tensor, capfd: pytest.CaptureFixture[str]
) -> None:
    [(_, _, weights), _] = run_ranks(train_without_room, tmp_path, how)
    torch.testing.assert_close(weights, undisturbed, rtol=0, atol=1e-12)
    said = "".join(capfd.readouterr())
    why = r"would keep \d+ bytes, and several copies, where 4000 are free" if how == "little" else "No space left"
    assert len(re.findall(rf"no more copies of the state in memory: .*{why}", said)) == 1, said


def test_without_copies_a_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    for step in (0, 1):
        with unitrain.init(backend="single", device="cpu", memory_copies={"every": 0}) as strategy:
            model = strategy.prepare(nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            checkpoint = strategy.checkpoint(tmp_path, model=model, optimizer=optimizer)
            assert checkpoint.resume() == (step > 0)
            strategy.step(model(torch.ones(1, 1)).sum(), optimizer)
            assert strategy.global_step == step + 1
            checkpoint.save()


def test_others_may_not_use_the_folder(tmp_path: Path) -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        store = MemoryStore(strategy.communicator, "a run", str(tmp_path))
        assert (store.why, store.disk.root.stat().st_mode & 0o777) == ("", 0o700)
        store.disk.root.chmod(0o755)
        assert "is not a folder of this user only" in MemoryStore(strategy.communicator, "a run", str(tmp_path)).why


@pytest.mark.parametrize(("shares", "every"), [(1e-4, 1), (0.01, 1), (0.05, 5), (0.5, 50)])
def test_copies_take_a_hundredth_of_the_time(shares: float, every: int) -> None:
    assert steps_between(shares) == every
