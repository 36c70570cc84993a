"""``unitrain checkpoint export`` and ``import``, against what torch.distributed.checkpoint itself reads and writes."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

import unitrain
from unitrain import CheckpointError
from unitrain.commands.cli import main

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = StateDictOptions()


class Net(nn.Module):
    """Weights that can be divided unevenly, two of one shape; BatchNorm's counts are no floats."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.last = nn.Linear(3, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.narrow(self.norm(self.wide(x))))
        return out


def made(seed: int, *, reverse: bool = False, shard: bool = False) -> tuple[Net, Optimizer]:
    """Return a model, sharded as by a script of FSDP's, and an optimizer whose two groups have other options."""
    torch.manual_seed(seed)
    model = Net().double()
    if shard:
        fully_shard(model)
    last, others = [model.last.weight], [p for name, p in model.named_parameters() if name != "last.weight"]
    groups: list[dict[str, Any]] = [{"params": others[::-1] if reverse else others}, {"params": last, "lr": 0.2}]
    return model, AdamW(groups, lr=0.1)


def batch(step: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def plain_step(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    model(batch(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(value: Any) -> Any:
    """Return plain tensors in place of shards, and detached."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def assert_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_equal(found[key], value)
        elif isinstance(value, Tensor):
            assert torch.allclose(found[key], value, rtol=1e-9, atol=1e-12), key
        else:
            assert found[key] == value, key


def state_of(model: nn.Module, optimizer: Optimizer, options: StateDictOptions = NESTED) -> dict[str, Any]:
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": get_model_state_dict(model), "optimizer": optimizer_state}


# ---------------------------------------------------------------------------------------------------------- export


def save(folder: str) -> dict[str, Any]:
    """Train a sharded model, save it, and return the whole state as torch names it."""
    with unitrain.init(backend="fsdp", sync_batchnorm=True, device="cpu", precision="fp64", timeout_s=30) as strategy:
        model, optimizer = strategy.prepare(*made(0))
        notes = {"kept": 1}
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, notes=notes)
        for step in range(2):
            strategy.step(model(batch(step)[strategy.rank :: 2]).square().mean(), optimizer)
        checkpoint.save()
        checkpoint.close()
        return {"nested": whole(state_of(model, optimizer)), "flat": whole(state_of(model, optimizer, FLAT))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(save, str(folder))[0]


def load_sharded(folder: str, flat_folder: str) -> dict[str, Any]:
    """Read what was exported as a script of FSDP's does."""
    dist.init_process_group("gloo")
    found = {}
    for name, where, options in (("nested", folder, NESTED), ("flat", flat_folder, FLAT)):
        model, optimizer = made(1, shard=True)
        state = state_of(model, optimizer, options)
        dcp.load(state, checkpoint_id=where)
        found[name] = whole(state)
    dist.destroy_process_group()
    return found


Saved = tuple[Path, dict[str, Any]]


def test_torch_loads_what_was_exported(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nested, flat, bare = tmp_path / "nested", tmp_path / "flat", tmp_path / "bare"
    assert main(["checkpoint", "export", str(saved[0]), "-o", str(nested)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model: 10 tensors, as model...."
    assert lines[-1] == "left out: notes, random number generators"
    assert main(["checkpoint", "export", str(saved[0]), "-o", str(flat), "--flatten-optimizer"]) == 0
    found = run_ranks(load_sharded, str(nested), str(flat))[0]
    for name in ("nested", "flat"):
        assert_equal(found[name], saved[1][name])
    # Without a prefix, into a model that is not sharded.
    assert main(["checkpoint", "export", str(saved[0]), "-o", str(bare), "--object", "model="]) == 0
    model, _ = made(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(state := model.state_dict(), checkpoint_id=bare)
    assert_equal(dict(state), saved[1]["nested"]["model"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "flat", "nested"]


# ---------------------------------------------------------------------------------------------------------- import


def write_plainly(folder: str) -> dict[str, Any]:
    """Train and save as a script of FSDP's does: with torch's names, and as torchtitan names the keys."""
    dist.init_process_group("gloo")
    model, optimizer = made(0, shard=True)
    for step in range(2):
        plain_step(model, optimizer, step)
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=f"{folder}/nested")
    flat = state_of(model, optimizer, FLAT)["optimizer"]
    dcp.save({**state["model"], "optimizer": flat, "train_state": {"step": 2}}, checkpoint_id=f"{folder}/flat")
    plain_step(model, optimizer, 2)
    trained: dict[str, Any] = whole(state_of(model, optimizer))
    dist.destroy_process_group()
    return trained


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, run_ranks(write_plainly, str(folder))[0]


def continue_imported(folder: str, backend: str) -> dict[str, Any]:
    """Resume, make the third step, and return the whole state. The optimizer has its parameters in another order."""
    with unitrain.init(backend=backend, device="cpu", precision="fp64", timeout_s=30) as strategy:
        model, optimizer = strategy.prepare(*made(1, reverse=True))
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        assert checkpoint.resume()
        assert strategy.global_step == 2
        strategy.step(model(batch(2)).square().mean(), optimizer)  # the same batch on all ranks, as in write_plainly
        found: dict[str, Any] = whole(state_of(model, optimizer))
        checkpoint.close()
    return found


@pytest.mark.parametrize(
    ("name", "objects", "backend"),
    [("nested", [], "single"), ("flat", ["--object", "model=", "--object", "optimizer"], "fsdp")],
)
def test_a_run_continues_what_torch_has_written(
    plain: Saved, name: str, objects: list[str], backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(plain[0] / name)
    assert main(["checkpoint", "import", source, "-o", str(tmp_path), "--step", "2", *objects]) == 0
    assert (
        capsys.readouterr().out.splitlines()[1] == f"model: 10 tensors, from {'model.' if name == 'nested' else ''}..."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000002"]
    for found in run_ranks(continue_imported, str(tmp_path), backend, nprocs=1 if backend == "single" else 2):
        groups = [sorted(group.pop("params")) for group in found["optimizer"]["param_groups"]]
        assert groups == [sorted(group["params"]) for group in plain[1]["optimizer"]["param_groups"]]
        assert_equal(found["model"], plain[1]["model"])
        assert_equal(found["optimizer"]["state"], plain[1]["optimizer"]["state"])


def test_an_optimizer_of_other_parameters_is_refused(plain: Saved, tmp_path: Path) -> None:
    assert main(["checkpoint", "import", str(plain[0] / "nested"), "-o", str(tmp_path)]) == 0
    with unitrain.init(backend="single", device="cpu", precision="fp64") as strategy:
        model, _ = made(1)
        first, *others = model.parameters()
        optimizer = AdamW([{"params": others}, {"params": [first]}])
        model, optimizer = strategy.prepare(model, optimizer)
        with pytest.raises(CheckpointError, match=r"optimizer has model\.last\.weight in this run, but not in"):
            strategy.checkpoint(tmp_path, model=model, optimizer=optimizer).resume()


# --------------------------------------------------------------------------------------------------------- memory


def anonymous_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def beyond(*arguments: str) -> float:
    """Return by how much memory that is not a file's grows within a command, in MB."""
    ended, found = threading.Event(), [before := anonymous_mb()]

    def watch() -> None:
        while not ended.wait(0.002):
            found.append(anonymous_mb())

    watching = threading.Thread(target=watch)
    watching.start()
    assert main(["checkpoint", *arguments]) == 0
    ended.set()
    watching.join()
    return max(found) - before


def converted(folder: str) -> tuple[float, float]:
    with unitrain.init(backend="single", device="cpu") as strategy:
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(32)])  # of 128 MB
        checkpoint = strategy.checkpoint(f"{folder}/run", model=model, background=False)
        checkpoint.save()
        checkpoint.close()
    return (
        beyond("export", f"{folder}/run", "-o", f"{folder}/dcp"),
        beyond("import", f"{folder}/dcp", "-o", f"{folder}/imported"),
    )


@pytest.mark.soak
def test_a_model_is_not_held_in_memory(tmp_path: Path) -> None:
    assert max(run_ranks(converted, str(tmp_path), nprocs=1)[0]) < 64


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "{saved}", "-o", "{saved}"], "exists: name a new folder"),
        (["export", "{saved}", "-o", "{new}", "--object", "net"], "has no 'net'. It has model, optimizer, notes."),
        (
            ["export", "{saved}", "-o", "{new}", "--object", "optimizer"],
            "must be exported with it. Leave optimizer out",
        ),
        (["export", "{saved}", "-o", "/proc/x"], "/proc/.x."),
        (
            ["import", "{saved}", "-o", "{new}"],
            "no complete checkpoint of torch.distributed.checkpoint: name the folder",
        ),
        (["import", "{plain}/flat", "-o", "{new}", "--object", "net"], "no key that begins with 'net.', as net should"),
        (["import", "{plain}/flat", "-o", "{new}", "--object", "optimizer"], "which no imported model has: name the"),
        (["import", "{plain}/nested", "-o", "{new}", "--step", "-1"], "--step is -1, but must be at least 0"),
    ],
)
def test_what_can_t_be_done_is_one_message(
    saved: Saved, plain: Saved, arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"saved": saved[0], "plain": plain[0], "new": tmp_path / "new"}
    assert main(["checkpoint", *(one.format(**places) for one in arguments)]) != 0
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").glob("step-*"))


class _Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("damage", ["code", "metadata", "short", "missing", "outside"])
def test_damaged_checkpoints_are_refused_and_run_no_code(
    plain: Saved, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(plain[0] / "nested", tmp_path / "dcp")
    metadata, part = tmp_path / "dcp" / ".metadata", tmp_path / "dcp" / "__0_0.distcp"
    if damage == "code":
        metadata.write_bytes(pickle.dumps(_Harm()))
    elif damage == "metadata":
        metadata.write_bytes(metadata.read_bytes()[:100])
    elif damage == "short":
        part.write_bytes(part.read_bytes()[:100])
    elif damage == "missing":
        part.unlink()
    else:
        metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"/__0_0.distc"))
    assert main(["checkpoint", "import", "dcp", "-o", "out"]) != 0
    printed = capsys.readouterr().err
    assert "could not be read: " in printed
    assert printed.count("\n") == 1
    assert not Path("harm").exists()
    assert not list(Path("out").glob("step-*"))
