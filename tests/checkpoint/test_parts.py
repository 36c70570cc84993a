"""A checkpoint is a list of parts: features add theirs, and one whose feature is not there is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import unitrain
from unitrain import CheckpointError, Feature
from unitrain.communication.state_transfer import SentState
from unitrain.training.loop.sockets import Sockets
from unitrain.training.state_parts import StatePart


class Notes(StatePart):
    """A tensor of each rank, which rank 0 saves."""

    name = "notes"

    def __init__(self, sockets: Sockets) -> None:
        self._ranks = sockets.communicator
        self.mine = torch.full((2,), float(self._ranks.rank))

    def collect(self) -> Any:
        return self._ranks.all_gather(self.mine)

    def check(self, outline: Any, *, force: bool) -> None:
        if len(outline.shape) and outline.shape[0] != self._ranks.world_size and not force:
            raise CheckpointError(f"the notes are of {outline.shape[0]} ranks. Nothing was loaded.")

    def load(self, saved: SentState) -> None:
        self.mine = saved.receive()[self._ranks.rank % saved.outline.shape[0]] + 10


class TakesNotes(Feature):
    """Adds a part to checkpoints, and has a small state of its own."""

    name = "takes notes"

    def __init__(self) -> None:
        self.parts: list[Notes] = []
        self.steps = 0

    def plug_in(self, sockets: Sockets) -> None:
        super().plug_in(sockets)

        def make(objects: Any) -> Notes | None:
            if "model" not in objects:
                return None
            self.parts.append(Notes(sockets))
            return self.parts[-1]

        sockets.parts.append(make)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def train(folder: Path, with_feature: bool, steps: int, force: bool = False) -> tuple[list[float] | None, int, int]:
    """Resume, and return the notes, the feature's small state and the number of steps; then train and save."""
    with unitrain.init(device="cpu") as strategy:
        feature = strategy.add(TakesNotes()) if with_feature else None
        model, optimizer = strategy.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        checkpoint.resume(force=force)
        begun = strategy.global_step
        for _ in range(steps):
            strategy.step(model(torch.ones(1, 1)).sum(), optimizer)
        if feature is None:
            checkpoint.save()
            return None, 0, begun
        found = feature.parts[0].mine.tolist(), feature.steps, begun
        feature.steps += steps
        checkpoint.save()
        return found


def test_a_feature_adds_a_part_and_a_small_state(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(train, tmp_path, True, 2) == [([0, 0], 0, 0), ([1, 1], 0, 0)]
    assert (tmp_path / "step-0000000002" / "_feature.notes.pt").exists()
    assert run_ranks(train, tmp_path, True, 1) == [([10, 10], 2, 2), ([11, 11], 2, 2)]
    with pytest.raises(CheckpointError, match=r"the notes are of 2 ranks\. Nothing was loaded"):
        run_ranks(train, tmp_path, True, 1, nprocs=3)
    assert run_ranks(train, tmp_path, True, 0, True, nprocs=3)[2] == ([20, 20], 3, 3)
    assert "left out" not in "".join(capfd.readouterr())


def test_what_no_feature_uses_is_left_out_with_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(train, tmp_path, True, 2)
    capfd.readouterr()
    assert run_ranks(train, tmp_path, False, 1) == [(None, 0, 2)] * 2
    said = "".join(capfd.readouterr())
    for name in ("notes", "takes notes"):
        line = f"unitrain: the checkpoint has the state of {name}, which this run does not use: it is left out.\n"
        assert said.count(line) == 1
    assert not (tmp_path / "step-0000000003" / "_feature.notes.pt").exists()
    run_ranks(train, tmp_path, True, 1)
    assert "left out" not in "".join(capfd.readouterr()), "a part that the checkpoint lacks is no error"
