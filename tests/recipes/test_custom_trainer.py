"""The recipe with a trainer class of its own: callbacks, and resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recipe_runs import run_recipe


def test_it_learns_stops_early_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--lr=0.01", "--patience=1")
    run_recipe("custom_trainer", "--epochs=2", *flags)
    lines = run_recipe("custom_trainer", "--epochs=100", *flags)
    assert [line["epoch"] for line in lines] == list(range(len(lines)))
    *better, stopped = [line["val_accuracy"] for line in lines]
    assert max(better) > 0.92  # 0.89 by the nearest of the classes' mean images
    assert better == sorted(set(better)), "each epoch but the last was the best so far"
    assert stopped <= better[-1]
    best, last = (torch.load(f"out/{name}.pt", weights_only=True) for name in ("best", "model"))
    assert not torch.equal(best["1.weight"], last["1.weight"])
    assert f"best accuracy {max(better):.2%}" in capsys.readouterr().out
    # Its callbacks' states come back, so nothing is left to train.
    assert run_recipe("custom_trainer", "--epochs=100", *flags) == lines
