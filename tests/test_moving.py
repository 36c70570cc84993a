"""The page on moving a script to UniTrain: both versions run, and the new one trains one model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PAGE = Path(__file__).parents[1] / "docs" / "moving.md"


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def side(sign: str) -> str:
    """Return the script that the page's difference begins with (-), or ends with (+)."""
    [difference] = re.findall(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return "\n".join(line[1:] for line in difference.splitlines() if line[:1] in ("", " ", sign))


def run_side(sign: str, folder: str) -> None:
    os.chdir(folder)
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    train, test = (torch.utils.data.Subset(data, part) for part in (range(1400), range(1400, len(data))))
    names: dict[str, Any] = {"Net": Net, "DataLoader": DataLoader, "train_set": train, "test_set": test}
    exec(compile(side(sign), PAGE.name, "exec"), names)


@pytest.mark.parametrize(("sign", "worlds"), [("-", [1]), ("+", [1, 2])])
def test_both_scripts_learn_and_the_new_one_the_same_on_two_ranks(
    sign: str, worlds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNITRAIN_PRECISION", "fp64")
    weights = []
    for world in worlds:
        run_ranks(run_side, sign, str(tmp_path), nprocs=world)
        told = re.findall(r"^(\d+) (0\.\d+)$", capsys.readouterr().out, re.MULTILINE)
        assert [int(epoch) for epoch, _ in told] == list(range(10))
        assert float(told[-1][1]) > 0.85
        state = torch.load(tmp_path / "model.pt", weights_only=True)
        assert set(state) == set(Net().state_dict())
        weights.append(torch.cat([tensor.double().reshape(-1) for tensor in state.values()]))
    assert all(torch.allclose(one, weights[0], rtol=0, atol=1e-9) for one in weights)
