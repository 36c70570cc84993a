"""Construction without memory: parameters are on the meta device, buffers are not, and lost changes are noticed."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import init

from unitrain.training.models.deferred import construction_of, deferred


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=0)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False)
        self.recurrent = nn.LSTM(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight
        self.first = self.second = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("table", torch.arange(4).exp())


def test_parameters_take_no_memory_stay_tied_and_buffers_have_values() -> None:
    with deferred():
        model = Tied()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.head.weight is model.words.weight
    assert model.first is model.second
    assert not model.first.requires_grad
    assert torch.equal(model.get_buffer("table"), torch.arange(4).exp())
    construction = construction_of(model)
    assert construction is not None
    assert construction.changed_at is None  # reset_parameters can be called again
    assert not nn.Linear(2, 2).weight.is_meta
    with torch.device("meta"):
        assert construction_of(Tied()) is None


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        init.zeros_(self.layer.bias)


class ByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.weight.data.normal_(0, 0.02)


class Applied(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.apply(self._init_weights)

    def _init_weights(self, layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            init.trunc_normal_(layer.weight)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.weight = nn.Parameter(self.layer.weight * 2)


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        with torch.no_grad():
            self.layer.bias[0] = 1


class Orthogonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        init.orthogonal_(self.layer.weight)


@pytest.mark.parametrize("kind", [Orthogonal, Filled, ByData, Applied, Scaled, Indexed])
def test_a_change_that_a_constructor_makes_is_noticed(kind: type[nn.Module]) -> None:
    with deferred():
        model = kind()
    construction = construction_of(model)
    assert construction is not None
    assert construction.changed_at is not None
    assert construction.changed_at.startswith(f"{__file__}:")


def resident() -> dict[str, float]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0]: int(words[1]) / 1024 for words in lines if words[0] in ("VmRSS:", "VmHWM:")}


def test_building_takes_no_memory() -> None:
    with deferred():
        nn.Linear(2, 2)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # from now on, VmHWM is the peak
    before = resident()["VmRSS:"]
    with deferred():
        model = nn.Sequential(*(nn.Linear(3072, 3072) for _ in range(12)))  # of 36 MB
    assert resident()["VmHWM:"] - before < 36
    assert len(list(model.parameters())) == 24
