"""A checkpoint of before sharded state was written in torch's own format is resumed from, to the last bit.

``legacy_checkpoint.tar.xz`` was written by one process at revision 733c3e5. ``saved`` in ``whole.pt`` is the state when
it was saved, after 2 of an epoch's 4 steps, and ``continued`` the state after the epoch.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import Adam

import unitrain
from unitrain import Strategy


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


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("legacy")
    with tarfile.open(Path(__file__).with_name("legacy_checkpoint.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize(("settings", "world"), [({"backend": "single"}, 1), ({"backend": "fsdp"}, 2)])
def test_a_run_continues_a_checkpoint_of_before(
    legacy: Path, settings: dict[str, Any], world: int, tmp_path: Path
) -> None:
    source = legacy / "plain" / "step-0000000002"
    expected = torch.load(legacy / "plain" / "whole.pt")
    for found in run_ranks(resume, str(source), str(tmp_path), settings, nprocs=world):
        assert found["saved"].keys() == expected["saved"].keys()
        for key, value in expected["saved"].items():
            assert torch.equal(found["saved"][key], value), key
        for key, value in expected["continued"].items():
            assert torch.allclose(found["continued"][key], value, rtol=0, atol=1e-9), key
