"""What DataParallel refuses, and how it trains on several GPUs."""

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


def test_a_compiled_module_is_refused() -> None:
    compiled: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    with pytest.raises(UsageError, match=r"a compiled module can't be replicated on 2 devices"):
        backend_on(2).wrap_model(compiled)
    assert backend_on(1).wrap_model(compiled) is compiled


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
