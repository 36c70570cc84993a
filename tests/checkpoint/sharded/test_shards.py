"""What several ranks have written is read as if one had: by ``unitrain checkpoint``, and by other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from saved_run import folder_of, steps_in
from torch import Tensor, nn
from torch.optim import Adam

import unitrain
from unitrain.commands.cli import main


class Net(nn.Module):
    """Weights that can be divided evenly, unevenly and not at all; BatchNorm's counts are no floats."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.wide(x))) * self.scale
        return out


def save(folder: str) -> tuple[dict[str, Tensor], Tensor]:
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
    weights, state = run_ranks(save, str(folder), nprocs=3)[0]
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
