"""Models that are built without memory get the same weights on any number of ranks and any backend; or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import unitrain
from unitrain import UsageError

WORDS, WIDTH = 130, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.gate = nn.Parameter(torch.empty(()))
        self.scales = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", torch.empty(140, 140, dtype=torch.bool), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate)
        nn.init.constant_(self.scales, 0.5)
        self.get_buffer("mask").copy_(torch.triu(torch.ones(140, 140), 1))
        nn.init.zeros_(self.get_parameter("layers.2.bias"))  # of another module, within this one

    def forward(self, x: Tensor) -> Tensor:
        mask = self.get_buffer("mask")[: x.shape[1], : x.shape[1]]
        x = x + self.gate * self.attention(x, x, x, attn_mask=mask)[0] * self.scales.sum()
        out: Tensor = x + self.layers(x)
        return out


class Model(nn.Module):
    """Ties its head to its embedding, and initialises linear layers from the top, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)  # it has weak references to its weights
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(layer: nn.Module) -> None:
        if type(layer) is nn.Linear:
            layer.weight.data.normal_(0.0, 0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        x = x + self.recurrent(x)[0]
        out: Tensor = self.head(self.norm(x.flatten(0, 1)))
        return out


def train(settings: dict[str, Any], how: str = "on meta") -> tuple[dict[str, Tensor], list[float]]:
    """Build and train a model. Return its first weights and its losses."""
    with unitrain.init(device="cpu", timeout_s=60, **settings) as strategy:
        if how == "dense on rank 0":
            with torch.device("cpu" if strategy.is_main else "meta"):
                torch.manual_seed(0)
                model = Model()
        else:
            with torch.device("meta"):
                model = Model()
        optimizer = AdamW(model.parameters())
        called: list[int] = []
        model.words.weight.register_hook(lambda gradient: called.append(gradient.numel()))  # type: ignore[no-untyped-call]
        model.words.weight.learns = "fast"  # type: ignore[attr-defined]
        model, optimizer = strategy.prepare(model, optimizer, initialise=model._init_weights)
        kept = strategy.unwrap(model).get_parameter("words.weight")
        assert settings["backend"] == "fsdp" or vars(kept)["learns"] == "fast"
        plain = strategy.export(model)
        first = {**plain.state_dict(), **dict(plain.named_buffers())}
        words = torch.arange(24).view(4, 6)
        losses = []
        for _ in range(2):
            loss = cross_entropy(model(words), words.flatten())
            losses.append(loss.item())
            strategy.step(loss, optimizer)
        assert called == [WORDS * WIDTH] * 2
        assert not torch.equal(strategy.export(model).get_parameter("words.weight"), first["words.weight"])
        return first, losses


def assert_trained(found: Any, expected: Any) -> None:
    assert found[0].keys() == expected[0].keys()
    for name, weight in expected[0].items():
        assert torch.equal(found[0][name], weight), name
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


CASES = [
    ({"backend": "ddp"}, 2, "on meta"),
    ({"backend": "fsdp", "fsdp": {"wrap": ["Linear", "LSTM"]}}, 2, "on meta"),
    ({"backend": "fsdp"}, 3, "on meta"),
    ({"backend": "fsdp"}, 2, "dense on rank 0"),
    pytest.param({"backend": "ddp"}, 2, "dense on rank 0", marks=pytest.mark.soak),
    pytest.param({"backend": "horovod"}, 2, "on meta", marks=HOROVOD),
]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {how: run_ranks(train, {"backend": "single"}, how, nprocs=1)[0] for how in ("on meta", "dense on rank 0")}


@pytest.mark.parametrize(("settings", "world", "how"), CASES)
def test_weights_are_the_same_on_any_number_of_ranks_and_any_backend(
    settings: dict[str, Any], world: int, how: str, alone: dict[str, Any]
) -> None:
    for found in run_ranks(train, settings, how, nprocs=world):
        assert_trained(found, alone[how])


def test_weights_are_drawn_as_the_modules_say(alone: dict[str, Any]) -> None:
    weights = alone["on meta"][0]
    for block in ("blocks.0", "blocks.1"):
        assert weights[f"{block}.layers.0.weight"].std() == pytest.approx(0.02, rel=0.2)
        assert weights[f"{block}.layers.2.bias"].eq(0).all(), "the block's own reset_parameters comes later"
        assert weights[f"{block}.attention.in_proj_bias"].eq(0).all()
        assert weights[f"{block}.scales"].eq(0.5).all()
        assert weights[f"{block}.mask"].any()
    assert weights["words.weight"].std() == pytest.approx(1, rel=0.1)
    for name in ("gate", "attention.in_proj_weight", "layers.0.weight", "layers.0.bias"):
        assert not torch.equal(weights[f"blocks.0.{name}"], weights[f"blocks.1.{name}"]), name
    assert weights["head.weight"].equal(weights["words.weight"])
    assert weights["norm.running_var"].eq(1).all()


def test_two_models_differ_and_other_random_numbers_stay() -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        torch.manual_seed(3)
        later = torch.rand(2)
        torch.manual_seed(3)
        with torch.device("meta"):
            models = [nn.Linear(3, 4), nn.Linear(3, 4)]
        one, other = strategy.prepare(models[0], models[1], initialise=True)
        assert not torch.equal(one.weight, other.weight)
        assert torch.equal(torch.rand(2), later)
    with unitrain.init(backend="single", device="cpu", precision="fp64") as strategy:
        with torch.device("meta"):
            again = nn.Linear(3, 4)
        again = strategy.prepare(again, initialise=lambda module: None)
        assert torch.equal(again.weight, one.weight.double()), "the seed and the order of preparation decide"


def test_models_of_hugging_face_initialise_themselves() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=64, n_layer=8, n_head=2, bos_token_id=1, eos_token_id=2)
    with unitrain.init(backend="single", device="cpu") as strategy:
        with torch.device("meta"):
            model = GPT2LMHeadModel(config)
        model = strategy.prepare(model, initialise=model._init_weights)
        weights = model.state_dict()
        assert weights["transformer.h.1.mlp.c_fc.weight"].std() == pytest.approx(0.02, rel=0.05)
        assert weights["transformer.h.1.mlp.c_proj.weight"].std() == pytest.approx(0.02 / 4, rel=0.05)
        assert torch.isfinite(model(input_ids=torch.arange(6)[None]).logits).all()


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.gate = nn.Parameter(torch.randn(2))


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight[:2])


def weight_normed() -> Any:
    return nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))


REMEDY = r"Give the module a reset_parameters\(\) that sets it, or pass prepare\(\.\.\., initialise=function\)"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Direct, rf"prepare\(\) can't initialise 0\.gate of a Direct.*{REMEDY}"),
        (Partly, r"prepare\(\) can't initialise 0\.weight of a Partly"),
        (weight_normed, r"0\.parametrizations\.weight\.original0 of a ParametrizationList"),
    ],
)
@on_ranks()
def test_what_nothing_initialises_is_refused_by_name(kind: Callable[[], nn.Module], said: str) -> None:
    with unitrain.init(device="cpu", timeout_s=30) as strategy:
        with torch.device("meta"):
            model = kind()
        with pytest.raises(UsageError, match=said):
            strategy.prepare(nn.Sequential(model), initialise=lambda module: None)


class Lost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2), persistent=False)


def test_weights_of_a_model_on_the_meta_device_are_nan_until_they_are_loaded(tmp_path: Path) -> None:
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
        assert other(torch.ones(1, 1, 3))[0].isnan().all(), "what was not loaded shows up"
        other.load_state_dict({**state, last[0]: last[1]})
        for model in (one, other):
            assert torch.equal(model(torch.ones(1, 1, 3))[0], expected(torch.ones(1, 1, 3))[0])


@on_ranks()
def test_a_model_without_values_is_refused_or_nan() -> None:
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        with torch.device("meta"):
            lost, model = Lost(), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        said = r"1 buffers that no checkpoint contains \(table, \.\.\.\) have no values.* pass prepare\(\.\.\., init"
        with pytest.raises(UsageError, match=said):
            strategy.prepare(lost)
        with pytest.raises(UsageError, match=r"prepare\(\) can't initialise table of a Lost"):
            strategy.prepare(lost, initialise=True)
        model = strategy.prepare(model)
        assert all(strategy.full_tensor(p.detach()).isnan().all() for p in model.parameters())
