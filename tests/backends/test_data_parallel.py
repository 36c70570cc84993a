"""How DataParallel splits a batch. On a CPU, torch runs no replicas, but the split is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import unitrain
from unitrain import Launch, StrategyConfig, UsageError
from unitrain.communication.backend import Backend, load_backend

CPU = torch.device("cpu")


def backend_on(devices: int) -> Backend:
    backend = load_backend("data_parallel")(StrategyConfig(device="cpu"), Launch("python"), CPU)
    backend.devices = (CPU,) * devices
    return backend


def split(devices: int, *inputs: Any, **kwargs: Any) -> tuple[list[Any], list[Any]]:
    wrapped: Any = backend_on(devices).wrap_model(nn.Linear(1, 1))
    shares: tuple[list[Any], list[Any]] = wrapped.scatter(inputs, kwargs, [CPU] * devices)
    return shares


@pytest.mark.parametrize(
    ("rows", "expected"), [(10, [3, 3, 2, 2]), (5, [2, 1, 1, 1]), (4, [1] * 4), (2, [1, 1]), (0, [0])]
)
def test_the_rows_are_spread_evenly_over_no_more_devices_than_rows(rows: int, expected: list[int]) -> None:
    batch = torch.arange(rows)
    inputs, kwargs = split(4, {"x": batch, "names": "kept"}, mask=(batch + 10,), scale=torch.tensor(2.0))
    assert [len(share[0]["x"]) for share in inputs] == expected
    assert torch.cat([share[0]["x"] for share in inputs]).equal(batch)
    assert torch.cat([share["mask"][0] for share in kwargs]).equal(batch + 10)
    assert all(share[0]["names"] == "kept" for share in inputs)
    assert all(share["scale"] == 2.0 for share in kwargs), "what has no rows goes to every device"


def test_a_compiled_module_is_refused() -> None:
    compiled: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    with pytest.raises(UsageError, match=r"a compiled module can't be replicated on 2 devices"):
        backend_on(2).wrap_model(compiled)
    assert backend_on(1).wrap_model(compiled) is compiled


def test_gradients_flow_back_through_the_split() -> None:
    batch = torch.ones(5, 1, requires_grad=True)
    inputs, _ = split(2, batch)
    sum((i + 1) * share[0].sum() for i, share in enumerate(inputs)).backward()
    assert batch.grad is not None
    assert batch.grad.flatten().tolist() == [1, 1, 1, 2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs, and pytest -m gpu to see them")
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_batch_trains_as_on_one_device(rows: int) -> None:
    def gradient(model: nn.Module, batch: Tensor) -> Tensor:
        mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()  # type: ignore[no-untyped-call]
        return torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])

    torch.manual_seed(0)
    plain, batch = nn.Linear(4, 1).double(), torch.randn(rows, 4, dtype=torch.float64)
    strategy = unitrain.init(backend="data_parallel", precision="fp64")
    model = nn.Linear(4, 1)
    model.load_state_dict(plain.state_dict())
    model = strategy.prepare(model)
    assert torch.allclose(gradient(model, batch.to(strategy.device)), gradient(plain, batch), rtol=0, atol=1e-12)


def test_a_model_that_returns_its_own_loss_is_refused() -> None:
    """Torch would make a vector of the replicas' losses, which are means over parts of different sizes."""
    wrapped: Any = backend_on(2).wrap_model(nn.Linear(1, 1))
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(UsageError, match="Compute the loss from the model's outputs"):
        wrapped.gather([{"loss": loss}, {"loss": loss}], 0)
