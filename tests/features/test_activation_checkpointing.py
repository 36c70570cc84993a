"""``activation_checkpointing``: the same training with less memory; what it would count twice is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from needs import HOROVOD, compiled_by
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

import unitrain
from unitrain import ConfigError, Strategy, UsageError
from unitrain.features.activation_checkpointing import Settings

EXACT = 1e-9


class Block(nn.Module):
    """A layer with dropout, and a buffer that a forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(4, 4, 1)
        self.norm = nn.GroupNorm(2, 4)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("scale", torch.full((), 2.0))
        self.scale: Tensor

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        out: Tensor = x + self.drop(torch.tanh(self.norm(self.layer(x)))) / self.scale + shift
        return out


class Net(nn.Module):
    def __init__(self, dropout: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(4, 2)
        for block in self.blocks if not dropout else ():
            block.drop = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, shift=0.1)
        out: Tensor = self.last(x.mean(2))
        return out


def _open(**settings: Any) -> Strategy:
    return unitrain.init(**{"precision": "fp64", "timeout_s": 60, **settings})


def _samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(23, 4, 3, generator=generator), torch.randn(23, 2, generator=generator))


def _trained(wanted: bool | Sequence[str], **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of this rank and the final state; the last batch of 11, 11 and 1 has stand-ins."""
    with _open(activation_checkpointing=wanted, **settings) as strategy:
        torch.manual_seed(0)
        module = Net(dropout=not settings.get("compile"))
        model, optimizer = strategy.prepare(module, SGD(module.parameters(), lr=0.1))
        train = strategy.dataloader(_samples(), global_batch_size=11)
        losses = []
        for _ in train.epochs(2):
            for x, y in train:
                loss = mse_loss(model(x), y.double())
                strategy.step(loss, optimizer)
                losses.append(loss.item())
        return losses, copy.deepcopy(module.state_dict())


def _compare(**settings: Any) -> None:
    found, expected = (_trained(wanted, accumulate=2, **settings) for wanted in (["Block"], False))
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # torch's tracer has progress bars, whose thread would stay
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("nprocs", "launcher"), [(1, "spawn"), (2, "spawn"), pytest.param(2, "horovodrun", marks=HOROVOD)]
)
def test_losses_and_weights_are_the_same(nprocs: int, launcher: Any) -> None:
    run_ranks(_compare, nprocs=nprocs, launcher=launcher)


@pytest.mark.soak
@on_ranks(timeout=120)
def test_compiled() -> None:
    with compiled_by("aot_eager"):
        _compare(compile=True)
    assert not torch._dynamo.utils.counters["graph_break"]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(*(nn.Tanh() for _ in range(4)), nn.Linear(8, 8)) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def _peak(wanted: bool) -> float:
    """Return how much memory a step has in use at most, in units of the output of a layer."""
    with _open(backend="single", precision="fp32", activation_checkpointing=wanted) as strategy:
        module = Wide()
        model, optimizer = strategy.prepare(module, SGD(module.parameters(), lr=0.1))
        x = torch.ones(2**13, 8)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            strategy.step(model(x).mean(), optimizer)
        assert profiled.profiler is not None
        assert profiled.profiler.kineto_results is not None
        events = profiled.profiler.kineto_results.events()
        return float(max(accumulate(event.nbytes() for event in events if event.name() == "[memory]")) / x.nbytes)


def test_memory() -> None:
    """Of 8 blocks of 5 layers, the inputs of all are kept, and in the backward the activations of one."""
    without, with_it = _peak(False), _peak(True)
    assert 28 <= without < 35
    assert 8 <= with_it < 16


def test_the_model_stays_what_it_is() -> None:
    with _open(backend="single", activation_checkpointing=True) as strategy:
        module = Net()
        calls: list[str] = []
        parameters, keys = dict(module.named_parameters()), list(module.state_dict())
        module.blocks[0].register_forward_hook(lambda *_: calls.append("hook"))
        model, optimizer = strategy.prepare(module, SGD(module.parameters(), lr=0.1))
        strategy.step(model(torch.ones(2, 4, 3)).sum(), optimizer)
        assert calls == ["hook"]  # and not again in the backward
        assert all(type(block) is Block for block in module.blocks)
        assert all(parameters[name] is p for name, p in module.named_parameters())
        assert list(module.state_dict()) == keys
        average: Any = copy.deepcopy(module)
        strategy.step(model(torch.ones(2, 4, 3)).sum(), optimizer)
        with torch.no_grad():
            average.blocks[0].layer.weight.fill_(7)
        assert not torch.equal(average(torch.ones(2, 4, 3)), model(torch.ones(2, 4, 3))), "it has weights of its own"
        assert average(torch.ones(2, 4, 3)).requires_grad
        exported = strategy.export(model)
        assert [type(block) for block in exported.blocks] == [Block] * 3  # type: ignore[union-attr]
        assert vars(exported.blocks[1]).keys() == vars(Block()).keys()  # type: ignore[index]


def shadowed() -> nn.Module:
    module = Net()
    module.blocks[1].forward = lambda x, shift: x
    return module


def with_block(block: nn.Module) -> nn.Module:
    module = Net()
    module.blocks[1] = block
    return module


@pytest.mark.parametrize(
    ("wanted", "make", "said"),
    [
        (["Block", "Blok"], Net, r"names 'Blok'.*mean 'Block'\? There are Block, Conv1d, Dropout,"),
        (True, lambda: nn.Sequential(nn.Linear(1, 1)), r"no ModuleList or Sequential .*There are Linear, Sequential"),
        (True, shadowed, "a Block whose forward is an attribute"),
    ],
)
def test_blocks_that_can_not_be_checkpointed_are_refused(wanted: Any, make: Callable[[], nn.Module], said: str) -> None:
    with _open(backend="single", activation_checkpointing=wanted) as strategy:
        module = make()
        with pytest.raises(ConfigError, match=said):
            strategy.prepare(module)
        assert not strategy._prepared.has(next(module.parameters()))


class Counting(Block):
    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().square().mean()
        return super().forward(x, shift)


class CountingInPlace(Block):
    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        if self.training:
            self.scale.add_(1)
        return super().forward(x, shift)


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm1d(4))

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return super().forward(self.inner(x), shift)


@pytest.mark.parametrize(
    ("kind", "buffer"), [(Counting, "scale"), (CountingInPlace, "scale"), (Normed, r"inner\.0\.num_batches_tracked")]
)
def test_what_a_forward_would_count_twice_is_refused(kind: type[nn.Module], buffer: str) -> None:
    with _open(backend="single", activation_checkpointing=True) as strategy:
        model = strategy.prepare(with_block(kind()))
        with strategy.evaluation(model):
            model(torch.ones(2, 4, 3))
        with pytest.raises(UsageError, match=f"the forward of a {kind.__name__} changes its buffer {buffer}"):
            model(torch.ones(2, 4, 3))


def test_the_setting_is_read_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for written, expected in (("true", True), ("Block", ("Block",)), ("Block, Layer", ("Block", "Layer"))):
        monkeypatch.setenv("UNITRAIN_ACTIVATION_CHECKPOINTING", written)
        with _open(backend="single") as strategy:
            assert Settings.of(strategy.config).activation_checkpointing == expected
