"""Autocast is enabled wherever a forward runs and restored afterwards; fp64 is float64 throughout."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import unitrain
from unitrain import Strategy
from unitrain.communication.structure import tensors
from unitrain.training.models.precision import Precision

CPU = torch.device("cpu")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALVES: pytest.MarkDecorator = pytest.mark.parametrize("name", list(HALF))


class Recording(nn.Module):
    """A layer that notes what its matrix products come out as, and calls what it is told to."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.inner = inner
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor, error: Exception | None = None) -> Tensor:
        if self.inner is not None:
            self.inner(x, error)
        elif error is not None:
            raise error
        out: Tensor = self.layer(x)
        self.dtypes.append(out.dtype)
        return out


def applied(name: Any, module: nn.Module) -> Any:
    Precision(name, CPU).apply(module)
    return module


@HALVES
def test_two_replicas_in_two_threads_have_the_right_dtype(name: str) -> None:
    """What DataParallel does: new threads know at most that autocast is on, and not in which dtype."""
    module = applied(name, nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    dtypes: list[list[torch.dtype]] = []
    both_inside = threading.Barrier(2)

    def meet(*_: Any) -> None:
        both_inside.wait(10)

    module[1].register_forward_hook(meet)

    def replica() -> None:
        inside = [module(torch.ones(2, 4)).dtype for _ in range(20)]
        inside.append(nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype)
        dtypes.append(inside)

    threads = [threading.Thread(target=replica) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dtypes == [[HALF[name]] * 20 + [torch.float32]] * 2


def test_autocast_within_another() -> None:
    """A model called in a context of another dtype keeps its own, and gives the context back."""
    module = applied("bf16", Recording())
    with torch.autocast("cpu", torch.float16):
        module(torch.ones(1, 2))
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float16
    assert module.dtypes == [torch.bfloat16]


@HALVES
def test_an_error_in_forward_leaves_autocast_as_it_was(name: str) -> None:
    inner = applied(name, Recording())
    outer = applied(name, Recording(inner))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            outer(torch.ones(1, 2), ZeroDivisionError())
        with pytest.raises(TypeError):
            outer()
        assert not torch.is_autocast_enabled("cpu")
    outer(torch.ones(1, 2))
    assert outer.dtypes == [HALF[name]]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("prepend", [True, False], ids=["before ours", "after ours"])
def test_an_error_in_a_hook_leaves_autocast_as_it_was(prepend: bool) -> None:
    inner = applied("bf16", Recording())

    def refuse(*_: Any) -> None:
        raise ZeroDivisionError

    inner.register_forward_pre_hook(refuse, prepend=prepend)
    outer = applied("bf16", Recording(inner))
    with pytest.raises(ZeroDivisionError):
        outer(torch.ones(1, 2))
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(ZeroDivisionError):
        inner(torch.ones(1, 2))
    assert not torch.is_autocast_enabled("cpu")


def test_copies_call_their_own_forward_and_go_through_pickle() -> None:
    module = applied("bf16", Recording())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            twin.layer.weight.zero_()
            twin.layer.bias.fill_(7)
        out = twin(torch.ones(1, 2))
        assert out.tolist() == [[7, 7]]
        assert out.dtype == torch.bfloat16
        assert module.dtypes == []
    assert not torch.is_autocast_enabled("cpu")


def open_strategy(precision: Any) -> Strategy:
    return unitrain.init(backend="single", device="cpu", precision=precision)


@pytest.mark.parametrize("name", ["fp32", "fp64", "bf16", "fp16"])
def test_autocast_of_a_strategy(name: str) -> None:
    with open_strategy(name) as strategy, strategy.autocast():
        assert nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == HALF.get(name, torch.float32)
        assert torch.is_autocast_enabled("cpu") == (name in HALF)


@pytest.mark.parametrize("compiled_first", [False, True])
def test_torch_compile_before_and_after_prepare(monkeypatch: pytest.MonkeyPatch, compiled_first: bool) -> None:
    """What autocast's hooks hold between them is compiled as one graph."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # torch's tracer has progress bars, whose thread would stay
    graphs: list[torch.fx.GraphModule] = []

    def noting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    with open_strategy("bf16") as strategy:
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        if compiled_first:
            model = strategy.prepare(torch.compile(module, backend=noting))
        else:
            model = torch.compile(strategy.prepare(module), backend=noting)
        assert model(torch.ones(2, 4)).dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("cpu")
    [graph] = graphs
    linear = [node for node in graph.graph.nodes if node.target is torch._C._nn.linear]
    assert [node.meta["example_value"].dtype for node in linear] == [torch.bfloat16] * 2


class Pair(NamedTuple):
    images: Tensor
    labels: Tensor


class Takes(nn.Module):
    """Returns what forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("index", torch.arange(2))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs


def test_fp64_casts_floating_inputs_and_weights_and_nothing_else() -> None:
    x, n = torch.ones(1), torch.ones(1, dtype=torch.int32)
    with open_strategy("fp64") as strategy:
        module = Takes()
        weight = module.weight
        prepared = strategy.prepare(module)
        assert prepared.weight is weight
        assert (prepared.weight.dtype, prepared.index.dtype) == (torch.float64, torch.int64)
        nested = [x, (x, "text")], Pair(x, n), collections.OrderedDict(a=x)
        args, kwargs = prepared(x, n, *nested, more={"deep": [x.half()]})
    dtypes = [args[0].dtype, args[1].dtype, args[2][0].dtype, args[2][1][0].dtype, args[3].images.dtype]
    assert dtypes == [torch.float64, torch.int32, torch.float64, torch.float64, torch.float64]
    assert args[3].labels is n
    assert args[2][1][1] == "text"
    assert args[4]["a"].dtype == kwargs["more"]["deep"][0].dtype == torch.float64


@dataclasses.dataclass
class Inputs:
    images: Tensor
    labels: Tensor


@pytest.mark.parametrize(
    "inputs",
    [
        collections.UserDict(images=torch.ones(2), labels=torch.ones(2).int()),
        Inputs(torch.ones(2), torch.ones(2).int()),
        torch.nn.utils.rnn.pack_sequence([torch.ones(2)]),  # which has a method that moves it
    ],
    ids=lambda inputs: type(inputs).__name__,
)
def test_fp64_casts_inputs_in_containers_of_any_class(inputs: Any) -> None:
    with open_strategy("fp64") as strategy:
        (taken, again), _ = strategy.prepare(Takes())([inputs], inputs)
    assert type(again) is type(inputs)
    dtypes = [tensor.dtype for tensor in tensors(inputs, opened=True)]
    cast = [tensor.dtype for tensor in tensors(taken, opened=True)]
    assert dtypes[0] == torch.float32
    assert cast == [torch.float64, *dtypes[1:]]


def test_fp64_takes_optimizer_state_along() -> None:
    with open_strategy("fp64") as strategy:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        prepared, _ = strategy.prepare(model, optimizer)
        assert optimizer.state[model.weight]["momentum_buffer"].dtype == torch.float64
        strategy.step(prepared(torch.ones(1, 2)).sum(), optimizer)


@pytest.mark.parametrize("name", ["fp64", "bf16"])
def test_export_removes_what_was_added_and_nothing_else(name: str) -> None:
    with open_strategy(name) as strategy:
        module = nn.Sequential(nn.Linear(2, 2))
        calls: list[str] = []
        module.register_forward_pre_hook(lambda *_: calls.append("before"))
        module.register_forward_hook(lambda *_: calls.append("after"), always_call=True)
        exported = strategy.export(strategy.prepare(module))
        exported(torch.ones(1, 2).to(exported[0].weight.dtype))  # type: ignore[index]
    assert calls == ["before", "after"]
    assert len(exported._forward_hooks) == len(exported._forward_pre_hooks) == 1
    assert len(exported._forward_hooks_always_called) == 1
    assert not exported._forward_pre_hooks_with_kwargs
