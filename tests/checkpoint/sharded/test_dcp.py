"""A sharded checkpoint is read by torch.distributed.checkpoint as it is, and a run continues what that has loaded."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from saved_run import described
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_only

import unitrain
from unitrain import CheckpointError
from unitrain.checkpoint.sharded.dcp import METADATA, Piece, Stored
from unitrain.checkpoint.sharded.saving import Shards, joined_files, write_shards
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Draft
from unitrain.checkpoint.store.located import locate


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
    value = tree_map_only(DTensor, DTensor.full_tensor, value)
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def assert_equal(found: Any, expected: Any) -> None:
    values, others = ({keystr(path): one for path, one in tree_leaves_with_path(tree)} for tree in (found, expected))
    assert values.keys() == others.keys()
    for key, value in others.items():
        same = torch.allclose(values[key], value, 1e-9, 1e-12) if isinstance(value, Tensor) else values[key] == value
        assert same, key


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


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
        return {"state": whole(state_of(model, optimizer)), "step": f"{folder}/step-0000000002"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(save, str(folder))[0]


def load_sharded(folder: str) -> dict[str, Any]:
    """Read the checkpoint as a script of FSDP's does."""
    dist.init_process_group("gloo")
    state = state_of(*made(1, shard=True))
    dcp.load(state, checkpoint_id=folder)
    found: dict[str, Any] = whole(state)
    dist.destroy_process_group()
    return found


Saved = tuple[Path, dict[str, Any]]


def test_torch_loads_a_checkpoint_as_it_is(saved: Saved, tmp_path: Path) -> None:
    folder = saved[1]["step"]
    assert_equal(run_ranks(load_sharded, folder)[0], saved[1]["state"])
    # Into a model that is not sharded, without processes.
    model, _ = made(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load({"model": (state := model.state_dict())}, checkpoint_id=folder, no_dist=True)
        dcp_to_torch_save(folder, tmp_path / "all.pt")
    assert_equal(dict(state), saved[1]["state"]["model"])
    converted = torch.load(tmp_path / "all.pt")
    assert_equal(converted["model"], saved[1]["state"]["model"])
    assert_equal(converted["optimizer"]["state"], saved[1]["state"]["optimizer"]["state"])


def write_plainly(folder: str) -> dict[str, Any]:
    """Train and save as a script of FSDP's does."""
    dist.init_process_group("gloo")
    model, optimizer = made(0, shard=True)
    for step in range(2):
        plain_step(model, optimizer, step)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    plain_step(model, optimizer, 2)
    trained: dict[str, Any] = whole(state_of(model, optimizer))
    dist.destroy_process_group()
    return trained


def continue_from(source: str) -> dict[str, Any]:
    """Load by torch, make the third step, and return the whole state. The optimizer has another order."""
    with unitrain.init(backend="fsdp", device="cpu", precision="fp64", timeout_s=30) as strategy:
        state = state_of(*(objects := made(1, reverse=True)))
        dcp.load(state, checkpoint_id=source, no_dist=True)
        set_state_dict(*objects, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        model, optimizer = strategy.prepare(*objects)
        strategy.step(model(batch(2)).square().mean(), optimizer)  # the same batch on all ranks, as in write_plainly
        found: dict[str, Any] = whole(state_of(model, optimizer))
    return found


def test_a_run_continues_what_torch_has_written_and_loads(tmp_path: Path) -> None:
    expected = run_ranks(write_plainly, str(tmp_path))[0]
    for found in run_ranks(continue_from, str(tmp_path)):
        assert_equal(found["model"], expected["model"])
        assert_equal(found["optimizer"]["state"], expected["optimizer"]["state"])


class _Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("content", [pickle.dumps(_Harm()), b"no pickle"], ids=["code", "other"])
def test_odd_metadata_are_refused_and_run_no_code(
    saved: Saved, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved[1]["step"], tmp_path / "copy")
    (tmp_path / "copy" / METADATA).write_bytes(content)
    described(tmp_path / "copy")  # as an attacker would
    with unitrain.init(backend="single", device="cpu", precision="fp64") as strategy:
        model, optimizer = strategy.prepare(*made(1))
        checkpoint = strategy.checkpoint(tmp_path / "run", model=model, optimizer=optimizer)
        with pytest.raises(CheckpointError, match=r"\.metadata could not be read: "):
            checkpoint.resume(tmp_path / "copy")
    assert not Path("harm").exists()


MADE: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(5, 3),
    "transposed": lambda: torch.randn(3, 5).t(),
    "view": lambda: torch.randn(9, 3)[4:],
    "conjugate": lambda: torch.randn(5, 3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(5, 3, dtype=torch.complex64).conj().imag,
    "flags": lambda: torch.rand(7) > 0.5,
    "number": lambda: torch.randn((), dtype=torch.float64),
    "empty": lambda: torch.randn(0, 3),
    "bfloat16": lambda: torch.randn(11).bfloat16(),
}


@pytest.mark.parametrize("name", MADE)
def test_tensors_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    value = MADE[name]()
    place = Piece(("model", "w"), str(value.dtype).removeprefix("torch."), tuple(value.shape), (0,) * value.dim())
    draft = Draft(Disk(tmp_path), "step-0000000001")
    draft.store.make(draft.name)
    note = json.loads(json.dumps(write_shards(draft, 0, Shards([value], [place]))))
    draft.complete(1, {"strategy": {}, "config": {}}, joined_files(draft, [note]))
    located = locate(draft.store, draft.name)
    stored = Stored(located, draft.store.get(located.file_name(METADATA)))
    assert torch.equal(stored.whole("model.w"), value)
