"""Checkpoints of before sharded state was written in torch's own format are resumed from, to the last bit.

``legacy_checkpoints.tar.xz`` was written by revision 733c3e5: by one process (``plain``), by 3 with fsdp (``fsdp``),
and by 2 with ddp and rows of the optimizer's state (``rows``). ``saved`` in ``whole.pt`` is the state when it was
saved, after 2 of an epoch's 4 steps, and ``continued`` the state after the epoch.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from saved_run import described, folder_of
from torch import Tensor, nn
from torch.optim import Adam

import unitrain
from unitrain import CheckpointError, Strategy
from unitrain.commands.cli import main


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.wide(x))) * self.scale
        return out


def state(strategy: Strategy, model: nn.Module, optimizer: Adam) -> dict[str, Tensor]:
    found = {key: value.clone() for key, value in strategy.export(model).state_dict().items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, its in optimizer.state.items():
        for key, value in its.items():
            found[f"{names[parameter]}.{key}"] = strategy.full_tensor(value).detach().clone()
    return found


def resume(source: str, folder: str, settings: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Resume, and train to the end of the epoch. Return the whole state before and after."""
    with unitrain.init(device="cpu", precision="fp64", timeout_s=30, sync_batchnorm=True, **settings) as strategy:
        torch.manual_seed(strategy.rank)
        model = Net().double()
        model, optimizer = strategy.prepare(model, Adam(model.parameters(), lr=0.5))
        data = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        loader = strategy.dataloader(torch.utils.data.TensorDataset(data), global_batch_size=6)
        notes: dict[str, Any] = {}
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, loader=loader, notes=notes)
        assert checkpoint.resume(source)
        assert notes["kept"].tolist() == [1, 1]
        saved = state(strategy, model, optimizer)
        for (x,) in loader:
            strategy.step(model(x).square().mean(), optimizer)
        assert strategy.global_step == 4
        return {"saved": saved, "continued": state(strategy, model, optimizer)}


def unwrapped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state without the prefix that DDP gave to the names of parameters."""
    return {key.removeprefix("module."): value for key, value in state.items()}


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("legacy")
    with tarfile.open(Path(__file__).with_name("legacy_checkpoints.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("written", ["plain", "fsdp", "rows"])
@pytest.mark.parametrize(("settings", "world"), [({"backend": "single"}, 1), ({"backend": "fsdp"}, 2)])
def test_a_run_continues_a_checkpoint_of_before(
    legacy: Path, written: str, settings: dict[str, Any], world: int, tmp_path: Path
) -> None:
    source = legacy / written / "step-0000000002"
    expected = {when: unwrapped(its) for when, its in torch.load(legacy / written / "whole.pt").items()}
    for found in run_ranks(resume, str(source), str(tmp_path), settings, nprocs=world):
        assert found["saved"].keys() == expected["saved"].keys()
        for key, value in expected["saved"].items():
            assert torch.equal(found["saved"][key], value), key
        for key, value in expected["continued"].items():
            assert torch.allclose(found["continued"][key], value, rtol=0, atol=1e-9), key


def test_its_weights_are_merged(legacy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = legacy / "fsdp"
    assert main(["checkpoint", "merge", str(source), "-o", str(tmp_path / "model.pt")]) == 0
    expected = torch.load(source / "whole.pt")["saved"]
    for key, value in torch.load(tmp_path / "model.pt").items():
        assert torch.equal(value, expected[key])
    assert main(["checkpoint", "inspect", str(source)]) == 0
    assert "  wide.weight (5, 3) float64" in capsys.readouterr().out.splitlines()


def test_a_changed_bit_in_it_is_noticed(legacy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = legacy / "rows" / "step-0000000002" / "_shards-00001.pt"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 4
    part.write_bytes(content)
    assert main(["checkpoint", "inspect", str(legacy / "rows")]) != 0
    assert "_shards-00001.pt: its SHA-256 does not match the manifest" in capsys.readouterr().err


def resume_the_one_before(folder: str, damaged: str) -> str:
    """Resume from the newest intact checkpoint, and return what is said of a damaged one."""
    with unitrain.init(backend="fsdp", device="cpu", precision="fp64", timeout_s=30, sync_batchnorm=True) as strategy:
        model = Net().double()
        model, optimizer = strategy.prepare(model, Adam(model.parameters(), lr=0.5))
        data = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        loader = strategy.dataloader(torch.utils.data.TensorDataset(data), global_batch_size=6)
        notes: dict[str, Any] = {}
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, loader=loader, notes=notes)
        before = state(strategy, model, optimizer)
        with pytest.raises(CheckpointError) as refused:
            checkpoint.resume(damaged)
        for key, value in state(strategy, model, optimizer).items():
            assert torch.equal(value, before[key])
        assert checkpoint.resume()
        assert strategy.global_step == 2
        return str(refused.value)


@pytest.mark.parametrize("odd", [None, [1.0], torch.ones(2), {}, "one left out", "all left out"], ids=str)
def test_odd_content_with_right_digests_is_damage(legacy: Path, odd: Any, tmp_path: Path) -> None:
    shutil.copytree(legacy / "fsdp" / "step-0000000002", folder_of(tmp_path, 2))
    newest = shutil.copytree(legacy / "fsdp" / "step-0000000002", folder_of(tmp_path, 3))
    for part in sorted(newest.glob("_shards-*.pt"))[1:2] if odd != "all left out" else newest.glob("_shards-*.pt"):
        if isinstance(odd, str):
            described(newest, step=3, without=part.name)
        else:
            torch.save(odd, part)
            described(newest, step=3)
    for said in run_ranks(resume_the_one_before, str(tmp_path), str(newest)):
        assert said.startswith(f"the checkpoint is damaged: {newest}: its files are no checkpoint: ")
