"""A checkpoint that all ranks write and read, each its part: complete or not there, verified, merged by a command."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks, run_ranks
from saved_run import described, folder_of, steps_in, verified
from torch import Tensor, nn
from torch.optim import Adam

import unitrain
from unitrain import CheckpointError
from unitrain.checkpoint.sharded import dcp, loading, saving
from unitrain.checkpoint.sharded.saving import Shards, write_all
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Draft
from unitrain.checkpoint.store.located import checkpoint_at
from unitrain.checkpoint.store.located import verified as verified_file
from unitrain.commands.cli import main

WIDTH = 150


def made() -> tuple[nn.Module, Adam]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    return model, Adam(model.parameters(), lr=0.1)


def whole(strategy: unitrain.Strategy, model: nn.Module, optimizer: Adam) -> list[Tensor]:
    states = [value for its in optimizer.state.values() for value in its.values()]
    return [*strategy.export(model).state_dict().values(), *(strategy.full_tensor(value).clone() for value in states)]


def save(folder: str) -> list[Tensor]:
    """Save after each of two steps. Return weights and state."""
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        model, optimizer = strategy.prepare(*made())
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        for _ in range(2):
            strategy.step(model(torch.randn(4, WIDTH)).square().mean(), optimizer)
            checkpoint.save()
        checkpoint.wait()
        return whole(strategy, model, optimizer)


def resume(folder: str, device: str = "cpu", blind: int | None = None) -> tuple[int, int, list[Tensor]]:
    """Resume. Return the step, how many bytes were sent meanwhile, and weights and state."""
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        if strategy.rank == blind:
            vars(loading)["_seen"] = lambda *_: None
        with torch.device(device):
            model, optimizer = made()
        for parameter in model.parameters():
            parameter.data.fill_(strategy.rank)
        model, optimizer = strategy.prepare(model, optimizer)
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        backend = strategy.communicator.collectives._backend
        with patch.object(backend, "broadcast", side_effect=backend.broadcast) as broadcast:
            assert checkpoint.resume()
        sent = sum(call.args[0].nbytes for call in broadcast.call_args_list)
        step = strategy.global_step
        found = whole(strategy, model, optimizer)
        strategy.step(model(torch.randn(4, WIDTH)).square().mean(), optimizer)
        return step, sent, found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(save, str(folder), nprocs=3)[0]


Saved = tuple[Path, list[Tensor]]
STATE_BYTES = 3 * 4 * WIDTH * WIDTH


@pytest.mark.parametrize(("world", "device", "blind"), [(3, "cpu", None), (2, "meta", None), (2, "cpu", 1)])
def test_shards_are_not_sent_but_read_if_all_ranks_see_them(
    saved: Saved, world: int, device: str, blind: int | None
) -> None:
    for step, sent, found in run_ranks(resume, str(saved[0]), device, blind, nprocs=world):
        assert step == 2
        assert (sent > STATE_BYTES) == (blind is not None)
        torch.testing.assert_close(found, saved[1], rtol=0, atol=0)


def flip(folder: str) -> tuple[list[str], int]:
    """Change random bits, one at a time, and resume. Return what this rank has verified, and how often it failed."""
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        path, draw, noticed = Path(folder), random.Random(0), 0
        model, optimizer = strategy.prepare(*made())
        checkpoint = strategy.checkpoint(path.parent / "other", model=model, optimizer=optimizer)
        with patch.object(dcp, "verified", side_effect=verified_file) as verified:
            assert checkpoint.resume(path)
        read = [call.args[1] for call in verified.call_args_list]
        before = whole(strategy, model, optimizer)
        for name in checkpoint_at(path).manifest.files:
            content = (path / name).read_bytes()
            for _ in range(10):
                if strategy.is_main:
                    changed = bytearray(content)
                    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
                    (path / name).write_bytes(changed)
                with pytest.raises(CheckpointError, match=f"the checkpoint is damaged: .*{name}"):
                    checkpoint.resume(path)
                noticed += 1
            if strategy.is_main:
                (path / name).write_bytes(content)
        torch.testing.assert_close(whole(strategy, model, optimizer), before, rtol=0, atol=0)
        assert checkpoint.resume(path)
        return read, noticed


def test_no_bit_can_change_unnoticed_and_each_rank_verifies_what_it_reads(saved: Saved) -> None:
    newest = folder_of(saved[0], steps_in(saved[0])[0])
    for rank, (read, noticed) in enumerate(run_ranks(flip, str(newest), nprocs=3)):
        assert read == [f"__{rank}_0.distcp"]
        assert noticed == 5 * 10


def resume_damaged(folder: str) -> list[str]:
    said = []
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        model, optimizer = strategy.prepare(*made())
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        checkpoint.resume()
        said.append(str(strategy.global_step))
        for path in (f"{folder}/step-0000000002", f"{folder}/step-3"):
            with pytest.raises(CheckpointError) as error:
                checkpoint.resume(path)
            said.append(str(error.value))
        return said


@pytest.mark.parametrize("damage", ["cut", pytest.param("left out", marks=pytest.mark.all("of the manifest"))])
def test_cut_files_and_missing_ones_are_damage_that_all_ranks_see_before_they_load(damage: str, tmp_path: Path) -> None:
    run_ranks(save, str(tmp_path))
    newest = folder_of(tmp_path, 2)
    if damage == "cut":
        os.truncate(newest / "__1_0.distcp", 99)
    else:
        described(newest, without="__1_0.distcp")
    for said in run_ranks(resume_damaged, str(tmp_path)):
        assert said[0] == "1"
        assert "the checkpoint is damaged: " in said[1]
        assert "__1_0.distcp" in said[1]
        assert "does not exist, so it can't be resumed from" in said[2]


def save_or_fail(folder: str, steps: int, failing: tuple[int, str] | None = None, background: bool = True) -> str:
    """Save after each step; at the last one, a rank fails as it writes. Return the error."""
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=20) as strategy:
        model, optimizer = strategy.prepare(*made())
        checkpoint = strategy.checkpoint(folder, background=background, model=model, optimizer=optimizer)
        checkpoint.resume()
        try:
            for step in range(1, steps + 1):
                strategy.step(model(torch.ones(2, WIDTH) * step).square().mean(), optimizer)
                checkpoint.wait()
                if failing is not None and step == steps and strategy.rank == failing[0]:
                    vars(saving)["write_shards"] = fail_by(failing[1])
                checkpoint.save()
            if failing is None:
                checkpoint.wait()
            else:
                checkpoint.resume()  # waits, too
        except CheckpointError as error:
            return str(error)
    return ""


def fail_by(how: str) -> Any:
    def fail(draft: Draft, rank: int, shards: Shards) -> Any:
        draft.store.put(f"{draft.name}/__{rank}_0.distcp", b"half of it")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the disk is on fire")

    return fail


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that one process resumes."""
    with unitrain.init(backend="single", device="cpu") as strategy:
        model, optimizer = strategy.prepare(*made())
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        assert checkpoint.resume()
        return {"step": torch.tensor(strategy.global_step), **model.state_dict()}


@pytest.mark.parametrize(
    ("how", "rank"), [("kill", 1), ("raise", 0), pytest.param("raise", 1, marks=pytest.mark.all("another rank"))]
)
def test_a_rank_that_fails_as_it_writes_leaves_the_checkpoint_before(tmp_path: Path, how: str, rank: int) -> None:
    run_ranks(save_or_fail, str(tmp_path / "whole"), 1)
    folder = tmp_path / "failing"
    if how == "kill":
        with pytest.raises(Exception, match=rf"rank {rank} .*(SIGKILL|signal 9)"):
            run_ranks(save_or_fail, str(folder), 2, (rank, how))
    else:
        for said in run_ranks(save_or_fail, str(folder), 2, (rank, how)):
            assert "the disk is on fire" in said
            assert f"rank {rank} could not write its shards" in said or rank == 0
    found, expected = weights(folder), weights(tmp_path / "whole")
    assert found["step"] == 1
    assert all(map(torch.equal, found.values(), expected.values()))


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.all("not in the background")), True])
def test_every_rank_writes_its_own(tmp_path: Path, background: bool) -> None:
    run_ranks(save_or_fail, str(tmp_path), 1, None, background, nprocs=3)
    folder = folder_of(tmp_path, *steps_in(tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "_run.pt", "manifest.json",
    ]  # fmt: skip
    verified(folder)


def test_a_rank_that_does_not_write_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1 has not written its shards within timeout_s \(0\.1 s\)"):
        write_all(Draft(Disk(tmp_path), "draft"), Shards([], []), 2, 0.1)


@pytest.mark.parametrize("settings", [{"backend": "fsdp"}, {"backend": "ddp", "shard_optimizer": True}], ids=str)
@on_ranks()
def test_rank_0_writes_all_to_a_store_that_it_alone_sees(settings: dict[str, Any]) -> None:
    """The step after a resume is the same as before."""
    with unitrain.init(device="cpu", timeout_s=30, **settings) as strategy:
        model, optimizer = strategy.prepare(*made())
        strategy.step(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
        checkpoint = strategy.checkpoint(f"memory://run-{settings['backend']}", model=model, optimizer=optimizer)
        checkpoint.save()
        strategy.step(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
        before = {key: value.clone() for key, value in strategy.export(model).state_dict().items()}
        assert checkpoint.resume()
        strategy.step(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
        assert all(map(torch.equal, before.values(), strategy.export(model).state_dict().values()))


class Net(nn.Module):
    """Weights that can be divided evenly, unevenly and not at all; BatchNorm's counts are no floats."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.wide(x))) * self.scale
        return out


def save_net(folder: str) -> tuple[dict[str, Tensor], Tensor]:
    """Train, save, and return whole weights and a whole state of the optimizer."""
    with unitrain.init(backend="fsdp", sync_batchnorm=True, device="cpu", timeout_s=30) as strategy:
        torch.manual_seed(0)
        model = Net()
        prepared, optimizer = strategy.prepare(model, Adam(model.parameters(), lr=0.1))
        strategy.step(prepared(torch.randn(4, 3) + strategy.rank).square().mean(), optimizer)
        checkpoint = strategy.checkpoint(folder, model=prepared, optimizer=optimizer, notes={"kept": torch.ones(2)})
        checkpoint.save()
        checkpoint.wait()
        state = strategy.full_tensor(optimizer.state[model.wide.weight]["exp_avg"])
        return strategy.export(prepared).state_dict(), state


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], Tensor]:
    folder = tmp_path_factory.mktemp("run")
    weights, state = run_ranks(save_net, str(folder), nprocs=3)[0]
    return folder, weights, state


Written = tuple[Path, dict[str, Tensor], Tensor]


def test_inspect_lists_every_tensor_and_its_parts(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(written[0])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1, 6 files, ")
    assert lines[0].endswith("bytes, intact")
    assert "model: 9 tensors, 52 elements" in lines
    assert "  wide.weight (5, 3) float32, in 3 parts" in lines
    assert "  scale () float32" in lines
    assert "  norm.num_batches_tracked () int64" in lines
    assert "  state.1.exp_avg (5, 3) float32, in 3 parts" in lines
    assert "notes: 1 tensors, 2 elements" in lines


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_merge_writes_whole_weights_bit_for_bit(
    written: Written, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / name
    assert main(["checkpoint", "merge", str(written[0] / "step-0000000001"), "-o", str(output)]) == 0
    if name.endswith("pt"):
        found = torch.load(output)
    else:
        found = pytest.importorskip("safetensors.torch").load_file(output)
    assert found.keys() == written[1].keys()
    assert all(torch.equal(found[key], weight) for key, weight in written[1].items())
    assert [path.name for path in output.parent.iterdir()] == [name]


def test_merge_writes_other_objects_as_well(written: Written, tmp_path: Path) -> None:
    assert main(["checkpoint", "merge", str(written[0]), "--object", "optimizer", "-o", str(tmp_path / "o.pt")]) == 0
    states = torch.load(tmp_path / "o.pt")["state"].values()
    assert any(torch.equal(its["exp_avg"], written[2]) for its in states)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "{}/nothing"], "does not exist, so there is nothing to read"),
        (["merge", "{}", "-o", "{}/x.pt", "--object", "net"], "has no 'net'. It has model, optimizer, notes: name one"),
        (["merge", "{}", "-o", "{}/x.safetensors", "--object", "optimizer"], "merge into a .pt file"),
        (["merge", "{}", "-o", "/proc/x.pt"], "/proc/x.pt could not be written"),
    ],
)
def test_what_can_t_be_done_is_one_message(
    written: Written, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", *(one.format(written[0]) for one in arguments)]) != 0
    assert said in capsys.readouterr().err
    assert not list(written[0].glob("*.safetensors"))


def test_a_damaged_checkpoint_is_not_merged(written: Written, tmp_path: Path, capsys: Any) -> None:
    folder = folder_of(written[0], *steps_in(written[0]))
    path = folder / "__1_0.distcp"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    try:
        assert main(["checkpoint", "merge", str(folder), "-o", str(tmp_path / "x.pt")]) != 0
    finally:
        path.write_bytes(content)
    assert "the checkpoint is damaged" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
