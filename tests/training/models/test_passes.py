"""Passes over modules: when they are applied, in which order, and how an export undoes them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.optim import SGD

import unitrain
from unitrain import ConfigError


class Noted(unitrain.Feature, unitrain.ModulePass):
    """Notes when it is called, and which modules it gets."""

    def __init__(self, place: int, notes: list[str]) -> None:
        self.place = place
        self._notes = notes

    def inspect(self, modules: Sequence[nn.Module]) -> None:
        """Note the modules of a call."""
        self._notes.append(f"{self.place} inspects {' '.join(type(each).__name__ for each in modules)}")

    def apply(self, module: nn.Module) -> None:
        """Note the module and its dtype, which the precision changes."""
        self._notes.append(f"{self.place} changes {type(module).__name__} {next(module.parameters()).dtype}")
        vars(module).setdefault("changed_by", []).append(self.place)

    def revert(self, copy: nn.Module) -> None:
        """Note the copy, and remove what was added."""
        self._notes.append(f"{self.place} restores {type(copy).__name__}")
        assert vars(copy)["changed_by"].pop() == self.place
        if not vars(copy)["changed_by"]:
            del vars(copy)["changed_by"]


def test_they_see_all_modules_first_and_are_applied_by_their_places_and_reverted_the_other_way_round() -> None:
    notes: list[str] = []
    with unitrain.init(backend="single", device="cpu", precision="fp64") as strategy:
        for place in (50, 10):
            strategy.add(Noted(place, notes))
        linear, _, norm = strategy.prepare(model := nn.Linear(2, 2), SGD(model.parameters(), lr=0.1), nn.LayerNorm(2))
        assert notes == [
            "10 inspects Linear LayerNorm",
            "50 inspects Linear LayerNorm",
            "10 changes Linear torch.float32",
            "50 changes Linear torch.float64",
            "10 changes LayerNorm torch.float32",
            "50 changes LayerNorm torch.float64",
        ]
        del notes[:]
        strategy.prepare(SGD(norm.parameters(), lr=0.1))
        assert notes == [], "there is no module"
        exported = strategy.export(linear)
        assert notes == ["50 restores Linear", "10 restores Linear"]
        assert "changed_by" not in vars(exported)
        assert vars(linear)["changed_by"] == [10, 50], "the model itself stays as it is"


class Refuses(unitrain.Feature, unitrain.ModulePass):
    """Refuses each module."""

    def inspect(self, modules: Sequence[nn.Module]) -> None:
        """Raise ConfigError."""
        raise ConfigError("not this one")


def test_a_call_that_is_refused_changes_nothing() -> None:
    notes: list[str] = []
    with unitrain.init(backend="single", device="cpu", precision="fp64") as strategy:
        strategy.add(Noted(10, notes))
        strategy.add(Refuses())
        model = nn.Linear(2, 2)
        with pytest.raises(ConfigError, match="not this one"):
            strategy.prepare(model)
        assert notes == ["10 inspects Linear"]
        assert model.weight.dtype == torch.float32


def test_a_late_one_says_that_it_does_not_change_what_is_prepared(capfd: pytest.CaptureFixture[str]) -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        strategy.prepare(nn.Linear(2, 2))
        strategy.add(Noted(10, []))
    assert "unitrain: Noted changes modules that are prepared from now on, but none of those" in capfd.readouterr().err
