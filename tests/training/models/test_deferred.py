"""Building without memory: every tensor that is forgotten comes back with the bits that any construction gives it."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import init

from unitrain import UsageError
from unitrain.training.models.deferred import deferred, is_deferred, materialise

WIDTH = 160  # a square matrix is deferred


class Attention(nn.Module):
    """Initialises in the ways of many models: by a layer's own function, afterwards, in place, from a table."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        init.trunc_normal_(self.wide.weight, std=0.02)  # draws until a condition on the values is met
        init.orthogonal_(self.narrow.weight)
        self.own = nn.Parameter(torch.empty(WIDTH, 2 * WIDTH).normal_(generator=generator))
        self.register_buffer("mask", torch.tril(torch.ones(300, 300)).bool(), persistent=False)


class Model(nn.Module):
    """Has tied weights, parametrised ones, copied layers, rotary tables, and a last pass over all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(300, WIDTH, padding_idx=3)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        generator = torch.Generator().manual_seed(5)
        self.blocks = nn.ModuleList(Attention(generator) for _ in range(2))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 256), 2, enable_nested_tensor=False)
        self.recurrent = nn.LSTM(WIDTH, WIDTH)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        angles = torch.arange(512)[:, None] * torch.exp(torch.arange(0, 64, 2) / -10.0)
        table = torch.zeros(512, 64)
        table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
        self.register_buffer("table", table)
        self.head = nn.Linear(WIDTH, 300, bias=False)
        self.head.weight = self.words.weight
        self.apply(self.initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("narrow.weight"):
                parameter.data.mul_(0.5)

    @staticmethod
    def initialise(layer: nn.Module) -> None:
        if type(layer) is nn.Linear and layer.bias is not None:
            layer.weight.data.normal_(0, 0.02)
            nn.init.zeros_(layer.bias)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def in_memory(tensor: Tensor) -> Tensor:
    return materialise(tensor) if is_deferred(tensor) else tensor.detach()


def assert_same(deferred_model: nn.Module, expected: nn.Module) -> None:
    found, wanted = tensors(deferred_model), tensors(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        value = in_memory(found[name])
        assert torch.equal(value, tensor), name
        assert (value.dtype, value.stride(), found[name].requires_grad) == (
            tensor.dtype, tensor.stride(), tensor.requires_grad,
        ), name  # fmt: skip
        assert isinstance(found[name], nn.Parameter) == isinstance(tensor, nn.Parameter)
        assert found[name].device == tensor.device


def test_every_tensor_and_all_later_random_numbers_are_those_of_any_construction() -> None:
    torch.manual_seed(0)
    expected, later = Model(), torch.rand(3)
    torch.manual_seed(0)
    with deferred():
        model = Model()
    assert torch.equal(torch.rand(3), later)
    state = torch.get_rng_state()
    forgotten = {name for name, tensor in tensors(model).items() if is_deferred(tensor)}
    assert forgotten >= {name for name, tensor in tensors(expected).items() if tensor.nbytes >= 2**16}
    assert_same(model, expected)
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.head.weight is model.words.weight
    assert model.rates == expected.rates
    # What follows the construction is recorded as well; so is a copy.
    for one in (model, expected):
        torch.manual_seed(1)
        nn.init.normal_(one.words.weight, 1.0)
        one.get_parameter("blocks.0.own").data.mul_(2)
        one.blocks[1] = copy.deepcopy(one.blocks[0])
        one.to(torch.bfloat16)
        one.words.weight.data = torch.ones(2, 2)
    assert_same(model, expected)


def test_a_default_dtype_and_values_of_another_construction_count() -> None:
    def build(other: Tensor) -> nn.Module:
        torch.set_default_dtype(torch.float64)
        layer = nn.Linear(WIDTH, WIDTH)
        torch.set_default_dtype(torch.float32)
        with torch.no_grad():
            layer.weight.add_(other)
        return layer

    torch.manual_seed(0)
    expected = build(nn.Linear(WIDTH, WIDTH).weight)
    torch.manual_seed(0)
    with deferred():
        other = nn.Linear(WIDTH, WIDTH)
    with deferred():
        model = build(other.weight)
    assert_same(model, expected)


def test_what_can_t_be_done_is_one_message() -> None:
    with deferred():
        model = nn.Linear(WIDTH, WIDTH)
    assert repr(model.weight) == "DeferredTensor(shape=(160, 160), dtype=torch.float32)"
    with pytest.raises(UsageError, match="can't be saved before it is prepared"):
        pickle.dumps(model)
    with pytest.raises(UsageError, match=r"does not support aten.set_.*: build the model without it"):
        model.weight.detach().set_(torch.ones(3).untyped_storage(), 0, (3,), (1,))
    with pytest.raises(UsageError, match="can't be moved to another device: prepare"):
        model.to("meta")


def resident() -> dict[str, float]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0]: int(words[1]) / 1024 for words in lines if words[0] in ("VmRSS:", "VmHWM:")}


def test_building_takes_the_memory_of_a_few_of_the_largest_tensors() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # from now on, VmHWM is the peak
    before = resident()["VmRSS:"]
    with deferred():
        model = nn.Sequential(*(nn.Linear(3072, 3072) for _ in range(12)))  # of 36 MB
    assert resident()["VmHWM:"] - before < 6 * 36
    assert resident()["VmRSS:"] - before < 36
    assert in_memory(model.get_parameter("11.weight")).shape == (3072, 3072)
