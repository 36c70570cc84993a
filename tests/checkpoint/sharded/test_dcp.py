"""A sharded checkpoint is read by torch.distributed.checkpoint as it is, and what that has written is resumed from."""

from __future__ import annotations

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
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_only

import unitrain
from unitrain import CheckpointError
from unitrain.checkpoint.sharded.dcp import METADATA, Stored
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.located import Located, Manifest


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
    """Train and save as a script of FSDP's does, and with a model that has no name, as torchtitan saves it."""
    dist.init_process_group("gloo")
    model, optimizer = made(0, shard=True)
    for step in range(2):
        plain_step(model, optimizer, step)
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=f"{folder}/named")
    others = {"optimizer": state["optimizer"], "train_state": {"step": 2}}
    dcp.save({**state["model"], **others}, checkpoint_id=f"{folder}/unnamed")
    plain_step(model, optimizer, 2)
    trained: dict[str, Any] = whole(state_of(model, optimizer))
    dist.destroy_process_group()
    return trained


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, run_ranks(write_plainly, str(folder))[0]


def continue_from(source: str, backend: str, folder: str) -> dict[str, Any]:
    """Resume, make the third step, and return the whole state. The optimizer has its parameters in another order."""
    with unitrain.init(backend=backend, device="cpu", precision="fp64", timeout_s=30) as strategy:
        model, optimizer = strategy.prepare(*made(1, reverse=True))
        notes = {"kept": 1}
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, notes=notes)
        assert checkpoint.resume(source)
        assert strategy.global_step == 0  # torch does not save it
        assert notes == {"kept": 1}
        strategy.step(model(batch(2)).square().mean(), optimizer)  # the same batch on all ranks, as in write_plainly
        found: dict[str, Any] = whole(state_of(model, optimizer))
        checkpoint.close()
    return found


@pytest.mark.parametrize(("name", "backend"), [("named", "single"), ("unnamed", "fsdp")])
def test_a_run_continues_what_torch_has_written(plain: Saved, name: str, backend: str, tmp_path: Path) -> None:
    source = str(plain[0] / name)
    for found in run_ranks(continue_from, source, backend, str(tmp_path), nprocs=1 if backend == "single" else 2):
        groups = [sorted(group.pop("params")) for group in found["optimizer"]["param_groups"]]
        assert groups == [sorted(group["params"]) for group in plain[1]["optimizer"]["param_groups"]]
        assert_equal(found["model"], plain[1]["model"])
        assert_equal(found["optimizer"]["state"], plain[1]["optimizer"]["state"])


@pytest.fixture
def strategy() -> Any:
    with unitrain.init(backend="single", device="cpu", precision="fp64") as strategy:
        yield strategy


def test_other_parameters_and_names_are_refused(plain: Saved, strategy: unitrain.Strategy, tmp_path: Path) -> None:
    first, *others = (model := made(1)[0]).parameters()
    model, optimizer = strategy.prepare(model, AdamW([{"params": others}, {"params": [first]}]))
    for folder, objects, said in (
        ("a", {"model": model, "optimizer": optimizer}, r"optimizer has last\.weight in this run, but not in"),
        ("b", {"net": model}, r"has model, optimizer, but no net: name modules and optimizers"),
    ):
        checkpoint = strategy.checkpoint(tmp_path / folder, **objects)
        with pytest.raises(CheckpointError, match=said):
            checkpoint.resume(plain[0] / "named")
        checkpoint.close()


class _Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "code": lambda metadata, part: metadata.write_bytes(pickle.dumps(_Harm())),
    "metadata": lambda metadata, part: os.truncate(metadata, 100),
    "short": lambda metadata, part: os.truncate(part, 100),
    "missing": lambda metadata, part: part.unlink(),
    "outside": lambda metadata, part: metadata.write_bytes(
        metadata.read_bytes().replace(b"__0_0.distcp", b"/__0_0.distc")
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused_and_run_no_code(
    plain: Saved, strategy: unitrain.Strategy, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(plain[0] / "named", tmp_path / "dcp")
    DAMAGES[damage](tmp_path / "dcp" / ".metadata", tmp_path / "dcp" / "__0_0.distcp")
    model, optimizer = strategy.prepare(*made(1))
    checkpoint = strategy.checkpoint(tmp_path / "run", model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match=r"could not be read: |the checkpoint is damaged: "):
        checkpoint.resume(tmp_path / "dcp")
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
def test_tensors_that_torch_has_written_are_read_with_their_elements(name: str, tmp_path: Path) -> None:
    state = {f"{name}.{number}": MADE[name]() for number in range(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    located = Located(Disk(tmp_path), "", Manifest(step=0, strategy={}, config={}, files={}))
    stored = Stored(located, (tmp_path / METADATA).read_bytes())
    for key, value in state.items():
        assert torch.equal(stored.whole(key), value)
