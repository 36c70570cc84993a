"""Models that are built without memory get the weights of any construction, on every backend; or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import unitrain
from unitrain import UsageError

WORDS, WIDTH = 130, 160  # matrices are deferred


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.gate = nn.Parameter(torch.randn(()))
        self.register_buffer("mask", torch.triu(torch.ones(140, 140), 1).bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.get_buffer("mask")[: x.shape[1], : x.shape[1]]
        x = x + self.gate * self.attention(x, x, x, attn_mask=mask)[0]
        out: Tensor = x + self.layers(x)
        return out


class Model(nn.Module):
    """Draws its weights twice, as nanoGPT does, and ties its head to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)  # it has weak references to its weights
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            layer.weight.data.normal_(0.0, 0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        x = x + self.recurrent(x)[0]
        out: Tensor = self.head(x)
        return out


def train(settings: dict[str, Any], how: str = "deferred") -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Build and train a model. Return its first weights, losses, and random numbers that follow the construction."""
    with unitrain.init(device="cpu", timeout_s=60, **settings) as strategy:
        if how == "deferred":
            with strategy.deferred():
                model = Model()
        else:
            with torch.device("cpu" if how == "dense" or strategy.is_main else "meta"):
                model = Model()
        optimizer, drawn = AdamW(model.parameters()), torch.rand(2).tolist()
        called: list[int] = []
        model.words.weight.register_hook(lambda gradient: called.append(gradient.numel()))  # type: ignore[no-untyped-call]
        model.words.weight.learns = "fast"  # type: ignore[attr-defined]
        model, optimizer = strategy.prepare(model, optimizer)
        kept = strategy.unwrap(model).get_parameter("words.weight")
        assert settings["backend"] == "fsdp" or vars(kept)["learns"] == "fast"
        plain = strategy.export(model)
        first = {**plain.state_dict(), **dict(plain.named_buffers())}
        words = torch.arange(24).view(4, 6)
        losses = []
        for _ in range(2):
            loss = cross_entropy(model(words).flatten(0, 1), words.flatten())
            losses.append(loss.item())
            strategy.step(loss, optimizer)
        assert called == [WORDS * WIDTH] * 2
        return first, losses, drawn


def assert_trained(found: Any, expected: Any) -> None:
    assert found[0].keys() == expected[0].keys()
    for name, weight in expected[0].items():
        assert torch.equal(found[0][name], weight), name
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


CASES = [
    ({"backend": "single"}, 1, "deferred"),
    ({"backend": "ddp"}, 2, "deferred"),
    ({"backend": "fsdp"}, 2, "deferred"),
    ({"backend": "fsdp", "activation_checkpointing": True}, 3, "deferred"),
    ({"backend": "fsdp"}, 2, "dense on rank 0"),
    pytest.param({"backend": "ddp"}, 2, "dense on rank 0", marks=pytest.mark.soak),
    pytest.param({"backend": "horovod"}, 2, "deferred", marks=HOROVOD),
]


@pytest.fixture(scope="module")
def dense() -> Any:
    return run_ranks(train, {"backend": "single"}, "dense", nprocs=1)[0]


@pytest.mark.parametrize(("settings", "world", "how"), CASES)
def test_its_weights_are_those_of_one_process_that_builds_it_in_memory(
    settings: dict[str, Any], world: int, how: str, dense: Any
) -> None:
    launcher: Any = "horovodrun" if settings["backend"] == "horovod" else "spawn"
    for rank, found in enumerate(run_ranks(train, settings, how, nprocs=world, launcher=launcher)):
        assert_trained(found, dense)
        assert found[2] == dense[2] or (how != "deferred" and rank > 0)


@pytest.mark.soak
def test_in_fp64_as_well() -> None:
    settings = {"backend": "fsdp", "precision": "fp64"}
    expected = run_ranks(train, {**settings, "backend": "single"}, "dense", nprocs=1)[0]
    for found in run_ranks(train, settings):
        assert_trained(found, expected)
        assert found[0]["words.weight"].dtype == torch.float64


class Lost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2), persistent=False)


def without_values() -> list[str]:
    """Return the errors for models on the meta device."""
    said = []
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        with torch.device("meta"):
            lost, model = Lost(), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        try:
            strategy.prepare(lost)
        except UsageError as error:
            said.append(str(error))
        model = strategy.prepare(model)
        assert all(strategy.full_tensor(p.detach()).isnan().all() for p in model.parameters())
        try:
            model(torch.ones(1, 2))
        except UsageError as error:
            said.append(str(error))
        return said


def test_a_model_on_the_meta_device_is_called_when_all_its_weights_are_loaded(tmp_path: Path) -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        expected = nn.LSTM(3, 4)
        checkpoint = strategy.checkpoint(tmp_path, background=False, model=strategy.prepare(expected))
        checkpoint.save()
        checkpoint.close()
        with torch.device("meta"):
            models = [nn.LSTM(3, 4), nn.LSTM(3, 4)]
        one, other = strategy.prepare(models[0], models[1])
        strategy.checkpoint(tmp_path, model=one).resume()
        state = expected.state_dict()
        last = state.popitem()
        other.load_state_dict(state, strict=False)
        with pytest.raises(UsageError, match="4 of its weights"):
            other(torch.ones(1, 1, 3))
        other.load_state_dict({**state, last[0]: last[1]})
        for model in (one, other):
            assert torch.equal(model(torch.ones(1, 1, 3))[0], expected(torch.ones(1, 1, 3))[0])


def test_a_model_on_the_meta_device_is_not_called_without_values() -> None:
    for lost, called in run_ranks(without_values):
        assert "1 buffers that no checkpoint contains (table, ...) have no values" in lost
        assert "build it within `with strategy.deferred():` instead" in lost
        assert "4 of its weights (0.bias, 0.weight, 1.bias, ...) have no values: load them" in called
        assert "strategy.load_weights, or resume a checkpoint" in called
