"""Forwards that do more than compute, under the backend fsdp: change weights, or are differentiated twice.

And what is used beside a forward: tied weights, Hugging Face's methods.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim import SGD
from torch.utils.data import TensorDataset

import unitrain
from unitrain import CommunicationError, UsageError


class Bounded(nn.Linear):
    """A linear layer that bounds the norm of its weights in its forward, as EEGNet's do."""

    def __init__(self, how: str) -> None:
        super().__init__(4, 8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        bounded = self.weight.detach().renorm(p=2, dim=0, maxnorm=0.5)
        if self.how == "data":
            self.weight.data = bounded
        elif self.how == "in place":
            with torch.no_grad():
                self.weight.copy_(bounded)
        return super().forward(x)


class KeysThatFollow(nn.Module):
    """A model that moves weights in its forward towards others, as MoCo's key encoder; each is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleList([nn.Linear(4, 8), nn.Linear(4, 8).requires_grad_(False)])

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.encoders
        queried = query(x)
        with torch.no_grad():
            key.get_parameter("weight").mul_(0.5).add_(query.get_parameter("weight"), alpha=0.5)
        product: Tensor = queried * key(x)
        return product


def data() -> TensorDataset:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.square())


def losses_of(strategy: unitrain.Strategy, model: nn.Module, terms: str = "f") -> list[float]:
    """Train; return the losses.

    Args:
        strategy: prepares the model.
        model: the model.
        terms: the terms of the loss in the order of their forwards: f for the function, p for a gradient penalty.
    """
    model, optimizer = strategy.prepare(model, SGD((p for p in model.parameters() if p.requires_grad), lr=0.005))
    losses = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        errors: Tensor = model(x).sum(1) - y.sum(1)
        return errors.square().mean()

    def penalty(x: Tensor, y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        squares: Tensor = slope.square().sum(1)
        return squares.mean()

    loader = strategy.dataloader(data(), global_batch_size=6)
    for _ in loader.epochs(2):
        for x, y in loader:
            loss = torch.zeros((), dtype=x.dtype)
            for term in terms:
                loss = loss + (function(x, y) if term == "f" else penalty(x.clone().requires_grad_(), y))
            mean = strategy.meter()
            mean.add(mean=loss, count=len(x))
            losses.append(mean.value())
            strategy.step(loss, optimizer)
    return losses


def distil(strategy: unitrain.Strategy) -> list[float]:
    student, teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    student, teacher, optimizer = strategy.prepare(student, teacher, SGD(student.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        x = torch.ones(2, 4, dtype=torch.float64) * (strategy.rank + 1 if strategy.world_size > 1 else 1.5)
        loss = (student(x) - teacher(x)).mean()  # its mean over the ranks is that of the mean x
        losses.append((strategy.all_reduce(loss.detach()) / strategy.world_size).item())
        strategy.step(loss, optimizer)
        with torch.no_grad():
            for weight, average in zip(student.parameters(), teacher.parameters(), strict=True):
                average.mul_(0.5).add_(weight, alpha=0.5)
    return losses


def net(how: str = "") -> nn.Module:
    return nn.Sequential(Bounded(how), nn.Tanh(), nn.Linear(8, 4))


def train_what_works(backend: str, keep: bool) -> list[list[float]]:
    settings: dict[str, Any] = {}
    if backend == "fsdp":
        settings["fsdp"] = {"reshard_after_forward": not keep, "reshard_after_backward": False}
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=60, **settings) as strategy:
        found = [*(losses_of(strategy, net(), terms) for terms in ("fp", "pf")), distil(strategy)]
        return found if keep else [*found, losses_of(strategy, KeysThatFollow())]


@pytest.mark.parametrize("keep", [False, True])
def test_parents_that_change_units_gradient_penalties_and_teachers_train_as_in_one_process(keep: bool) -> None:
    (alone,) = run_ranks(train_what_works, "single", keep, nprocs=1)
    for found in run_ranks(train_what_works, "fsdp", keep):
        for losses, expected in zip(found, alone, strict=True):
            assert losses == pytest.approx(expected, abs=1e-9)


def train_what_is_refused() -> None:
    with unitrain.init(backend="fsdp", device="cpu", precision="fp64", timeout_s=60) as strategy:
        for how in ("data", "in place"):
            with pytest.raises(UsageError, match=r"changed (0\.)?weight, but under fsdp.*after strategy\.step"):
                losses_of(strategy, net(how))
        model, optimizer = strategy.prepare(model := net(), SGD(model.parameters(), lr=0.1))
        x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(UsageError, match=r"set fsdp\.reshard_after_backward to false"):
            strategy.backward(slope.square().sum(), optimizer)


def train_penalties_alone(backend: str) -> list[list[float]]:
    """Train with a penalty that needs no gathered weights, and with one that leaves a bias unused."""
    settings: list[dict[str, Any]] = [{}, {}]
    if backend == "fsdp":
        settings[1]["fsdp"] = {"find_unused_parameters": True, "reshard_after_backward": False}
    losses = []
    for model, its in zip((nn.Linear(4, 2, bias=False), net()), settings, strict=True):
        with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=60, **its) as strategy:
            losses.append(losses_of(strategy, model, "p"))
    return losses


def test_gradients_that_reach_a_unit_without_its_hooks_are_reduced() -> None:
    (alone,) = run_ranks(train_penalties_alone, "single", nprocs=1)
    for found in run_ranks(train_penalties_alone, "fsdp"):
        for losses, expected in zip(found, alone, strict=True):
            assert expected[-1] != expected[1]
            assert losses == pytest.approx(expected, abs=1e-9)


def test_what_would_be_lost_or_is_freed_is_refused() -> None:
    run_ranks(train_what_is_refused)


def compiled_change() -> None:
    with unitrain.init(backend="fsdp", device="cpu", precision="fp64", timeout_s=60) as strategy:
        model, optimizer = strategy.prepare(model := net("in place"), SGD(model.parameters(), lr=0.1))
        compiled: Any = torch.compile(model, backend="eager")
        with pytest.raises(UsageError, match=r"changed (0\.)?weight, but under fsdp"):
            strategy.step(compiled(torch.ones(2, 4, dtype=torch.float64)).mean(), optimizer)


def test_compiled_forwards_can_t_change_weights_either() -> None:
    run_ranks(compiled_change, timeout=120)


class Outputs:
    """An object that FSDP can't look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Block(nn.Module):
    """A unit with another method than a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Outputs:
        self.kept = self.layer(x)
        return Outputs(self.layer(self.kept.tanh()))

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Unusual(nn.Module):
    """A model that uses its layers in a way that FSDP doesn't see.

    Args:
        way: what the loss is computed from; or the layers that are used without calling them.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scales = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.ones(4))]) for _ in range(2))
        if way == "kept":
            self.scales.requires_grad_(False)
            self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        if self.way == "encode":
            return self.blocks[0].encode(x)  # type: ignore[operator]
        if self.way == "weights":
            return x @ self.blocks[0].layer.weight  # type: ignore[operator, union-attr]
        for block in self.blocks:
            x = block(x).value
        for scale in self.scales:
            x = x * scale[0]  # type: ignore[index]
        return Outputs(x)

    def loss(self, x: Tensor) -> Tensor:
        outputs = self(x).value
        values: Tensor = self.blocks[0].kept if self.way == "kept" else outputs  # type: ignore[assignment]
        return values.square().mean()


def steps_of_unusual(backend: str) -> list[Tensor]:
    """Return the weights after steps with each kind of loss; under fsdp, assert what the errors say, too."""
    settings: dict[str, Any] = {"fsdp": {"reshard_after_forward": False}} if backend == "fsdp" else {}
    weights: list[Tensor] = []
    x, _ = data()[:4]
    for way in ("outputs", "kept"):
        with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=60, **settings) as strategy:
            model = Unusual(way)
            model, optimizer = strategy.prepare(model, SGD((p for p in model.parameters() if p.requires_grad), lr=0.1))
            for _ in range(2):
                whole: Any = strategy.unwrap(model)
                strategy.step(whole.loss(x[strategy.rank :: strategy.world_size]), optimizer)
            weights += strategy.export(model).state_dict().values()
    return weights


def use_layers_without_calling_them() -> None:
    with unitrain.init(backend="fsdp", precision="fp64", device="cpu", timeout_s=60) as strategy:
        x, _ = data()[:4]
        with pytest.raises(UsageError, match=r"Block returns tensors in a Outputs.*set fsdp\.reshard_after_forw"):
            strategy.prepare(Unusual("outputs"))(x)
        for way, layer in (("encode", r"blocks\.0\.layer, a Linear"), ("weights", "the model, a Unusual")):
            model = strategy.prepare(Unusual(way))
            with pytest.raises(
                RuntimeError, match=rf"^the forward at .*{Path(__file__).name}:\d+ .*{layer}.*fsdp\.wrap"
            ):
                model(x)
            if way == "encode":
                register_fsdp_forward_method(strategy.unwrap(model).get_submodule("blocks.0"), "encode")
                model(x)


def test_outputs_that_fsdp_does_not_see_train_as_in_one_process_with_the_setting_that_the_error_names() -> None:
    (alone,) = run_ranks(steps_of_unusual, "single", nprocs=1)
    for found in run_ranks(steps_of_unusual, "fsdp"):
        for weight, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-9)


def test_layers_that_are_used_without_being_called_are_named() -> None:
    run_ranks(use_layers_without_calling_them)


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def mask(backend: str) -> list[Tensor]:
    """Return weights that are trained with a mask that was registered as a hook after ``prepare``."""
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=60) as strategy:
        model, optimizer = strategy.prepare(model := net(), SGD(model.parameters(), lr=0.1))
        weights = [strategy.unwrap(model).get_parameter(name) for name in ("0.weight", "2.weight")]
        weights[0].register_hook(lambda gradient: gradient * (torch.arange(4) % 2))  # type: ignore[no-untyped-call]
        handle = weights[1].register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        weights[1].register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
        for step in range(2):
            x, _ = data()[4 * step : 4 * step + 4]
            strategy.step(model(x[strategy.rank :: strategy.world_size]).square().mean(), optimizer)
            handle.remove()
        return list(strategy.export(model).state_dict().values())


def test_hooks_that_are_registered_on_shards_run() -> None:
    (alone,) = run_ranks(mask, "single", nprocs=1)
    for found in run_ranks(mask, "fsdp"):
        for weight, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-9)


class Tied(nn.Module):
    """A model with the methods of Hugging Face's, which use weights outside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.generate(words)

    def generate(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(words))
        return logits

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        torch.save(state_dict or self.state_dict(), folder / "model.pt")


WORDS = torch.arange(4)


def tie() -> None:
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=60) as strategy:
        model = Tied()
        model = strategy.prepare(model)
        model.head.weight = model.words.weight
        for _ in range(2):
            with pytest.raises(UsageError, match=r"head\.weight was tied to another weight after prepare\(\)"):
                model(WORDS)
        before = Tied()
        before.head.weight = before.words.weight
        before = strategy.prepare(before)
        before.head.weight = before.words.weight  # as tie_weights() of a model does that is tied
        before(WORDS)
        assert len(list(before.parameters())) == 1


def test_weights_are_not_tied_after_prepare() -> None:
    run_ranks(tie)


def use_methods(folder: Path) -> None:
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=60) as strategy:
        model = strategy.prepare(Tied())
        with pytest.raises(
            UsageError, match=r"strategy\.export\(model\) on all ranks, .*copy\.save_pretrained\(folder"
        ):
            strategy.unwrap(model).save_pretrained(folder)  # type: ignore[operator]
        with pytest.raises(UsageError, match=r"or pickled: use strategy\.export\(model\)"):
            torch.save(strategy.unwrap(model), io.BytesIO())
        with pytest.warns(UserWarning, match=r"sharded tensor, .*strategy\.save\(model, path\)") as warned:
            torch.save({"model": strategy.unwrap(model).state_dict()}, io.BytesIO())
        assert {warning.filename for warning in warned} == {__file__}
        assert not list(folder.iterdir())
        with torch.no_grad(), pytest.raises(UsageError, match=r"register_fsdp_forward_method\(strategy\.unwrap\(model"):
            strategy.unwrap(model).generate(WORDS)  # type: ignore[operator]
        register_fsdp_forward_method(strategy.unwrap(model), "generate")  # the remedies
        copy: Any = strategy.export(model)
        with torch.no_grad():
            assert torch.equal(strategy.unwrap(model).generate(WORDS), copy.generate(WORDS))  # type: ignore[operator]
        strategy.on_main(lambda: copy.save_pretrained(folder))
        assert torch.load(folder / "model.pt").keys() == {"words.weight", "head.weight"}


def test_methods_that_need_whole_weights_name_the_remedy(tmp_path: Path) -> None:
    run_ranks(use_methods, tmp_path)


def generate() -> None:
    """Call a model until the slower rank is done, as the docs say, and then as often as each rank needs."""
    with unitrain.init(backend="fsdp", precision="fp64", device="cpu", timeout_s=60) as strategy:
        model = strategy.prepare(net())
        left = torch.tensor(1 + strategy.rank)
        with torch.no_grad():
            while strategy.all_reduce(left > 0, "max"):
                model(torch.ones(2, 4, dtype=torch.float64))
                left -= 1
            for _ in range(1 + strategy.rank):
                model(torch.ones(2, 4, dtype=torch.float64))
            strategy.barrier()


def test_a_rank_that_calls_the_model_more_often_is_named_within_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommunicationError, match="exited with code 1"):
        run_ranks(generate)
    told = r"in barrier after .*, and rank 1 is in gathering the weights of 0 after step 0, for \d+ s, at \S+:\d+"
    assert len(re.findall(told, capsys.readouterr().out)) == 2
