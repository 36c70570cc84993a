"""``compile``: the same training as without, with every backend, and checkpoints that either continues."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD, compiled_by
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import unitrain
from unitrain import ConfigError, Strategy

SAMPLES = 23


class Net(nn.Module):
    """Two BatchNorm layers that do not depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 8, 1)
        self.one = nn.BatchNorm1d(8)
        self.other = nn.BatchNorm1d(8)
        self.second = nn.Conv1d(8, 8, 1)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.last((torch.tanh(self.one(self.second(x))) + self.other(x)).mean(2))
        return out


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # torch's tracer has progress bars, whose thread would stay
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def _samples(number: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(number, 4, 3, generator=generator), torch.randn(number, 2, generator=generator))


def _open(**settings: Any) -> Strategy:
    return unitrain.init(**{"precision": "fp64", "timeout_s": 60, **settings})


def _prepared(strategy: Strategy, module: nn.Module) -> tuple[nn.Module, Optimizer]:
    return strategy.prepare(module, SGD(module.parameters(), lr=0.1))


def _epochs(strategy: Strategy, model: nn.Module, optimizer: Optimizer, epochs: int, batch: int = 11) -> list[float]:
    """Train, with an evaluation after each epoch. Return the losses of this rank."""
    train = strategy.dataloader(_samples(SAMPLES), global_batch_size=batch)
    held_out = strategy.dataloader(_samples(7), global_batch_size=batch)
    losses = []
    for _ in train.epochs(epochs):
        for x, y in train:
            loss = mse_loss(model(x), y.double())
            strategy.step(loss, optimizer)
            losses.append(loss.item())
        with strategy.evaluation(model):
            losses += [mse_loss(model(x), y.double()).item() for x, y in held_out]
    return losses


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _by_inductor() -> None:
    with _open(sync_batchnorm=True) as strategy:
        expected = _epochs(strategy, *_prepared(strategy, _net()), 2)
    with _open(sync_batchnorm=True, compile=True) as strategy:
        assert _epochs(strategy, *_prepared(strategy, _net()), 2) == pytest.approx(expected, abs=1e-9, rel=0)
        assert _graphs() >= 3


@pytest.mark.soak
@pytest.mark.parametrize("nprocs", [1, 2])
def test_inductor_trains_as_eager(nprocs: int) -> None:
    run_ranks(_by_inductor, nprocs=nprocs, timeout=300)


def test_the_module_stays_as_it_is_and_copies_are_not_compiled() -> None:
    with compiled_by("eager"), _open(backend="single", compile=True) as strategy:
        module = _net()
        model, optimizer = _prepared(strategy, module)
        assert model is module
        _epochs(strategy, model, optimizer, 1)
        assert _graphs()
        assert list(module.state_dict()) == list(Net().state_dict())
        for copied in (strategy.export(model), copy.deepcopy(module)):
            assert type(copied) is Net
            assert copied._compiled_call_impl is None
            with torch.no_grad():
                copied.last.bias.fill_(7)
            assert copied.eval()(torch.zeros(1, 4, 3).to(copied.last.weight)).shape == (1, 2)
        assert not (module.last.bias == 7).any()


def _as_eager(settings: dict[str, Any]) -> None:
    """On 2 ranks, the last batch of 11, 11 and 1 is a stand-in on rank 1. Later epochs compile nothing."""
    with _open(**settings) as strategy:
        expected = _epochs(strategy, *_prepared(strategy, _net()), 3)
    with compiled_by("aot_eager"), _open(**settings, compile=True) as strategy:
        model, optimizer = _prepared(strategy, _net())
        losses = _epochs(strategy, model, optimizer, 1)
        graphs = _graphs()
        losses += _epochs(strategy, model, optimizer, 2)
        assert losses == pytest.approx(expected, abs=1e-9, rel=0)
        assert _graphs() == graphs
        if not settings["sync_batchnorm"]:
            assert graphs <= 6
            assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow("compiles on each rank")
@pytest.mark.parametrize(
    ("launcher", "synchronized"),
    [
        ("spawn", True),
        pytest.param("spawn", False, marks=pytest.mark.all("synchronised BatchNorm is harder to compile")),
        pytest.param("horovodrun", True, marks=[HOROVOD, pytest.mark.soak]),
    ],
)
def test_ranks_train_as_eager_with_stand_ins_and_bounded_recompilation(launcher: Any, synchronized: bool) -> None:
    run_ranks(_as_eager, {"sync_batchnorm": synchronized}, launcher=launcher)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_the_script_has_compiled_is_left_as_it_is(in_place: bool) -> None:
    graphs: list[Any] = []

    def noting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with _open(backend="single", precision="fp32", compile=True) as strategy:
        module = _net()
        compiled: Any = module
        if in_place:
            module.compile(backend=noting)
        else:
            compiled = torch.compile(module, backend=noting)
        model, optimizer = _prepared(strategy, compiled)
        strategy.step(model(torch.ones(2, 4, 3)).sum(), optimizer)
        assert strategy.unwrap(model) is module
    assert len(graphs) == _graphs() == 1


@pytest.mark.parametrize("first", [False, True])
def test_checkpoints_of_compiled_and_plain_runs(tmp_path: Path, first: bool) -> None:
    weights: list[dict[str, Tensor]] = []
    for compiled in (first, not first):
        with compiled_by("eager"), _open(backend="single", compile=compiled) as strategy:
            model, optimizer = _prepared(strategy, _net())
            checkpoint = strategy.checkpoint(tmp_path, background=False, partial=True, model=model, optimizer=optimizer)
            assert checkpoint.resume() == bool(weights)
            if not weights:
                _epochs(strategy, model, optimizer, 1)
                checkpoint.save()
            weights.append(copy.deepcopy(model.state_dict()))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(one, other) for one, other in zip(*(w.values() for w in weights), strict=True))


def test_ddp_buckets_that_the_compiler_does_not_support_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ddp\.bucket_cap_mb of at least 1"):
        unitrain.init(backend="ddp", compile=True, ddp={"bucket_cap_mb": 0.5})
