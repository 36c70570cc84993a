"""A script that uses DDP's wrapper as its own module is told of the module, and nothing that it sets is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn

import unitrain
from unitrain import UsageError


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)
        self.temperature = 1.0
        self.device = "of the script's own"  # DDP has an attribute of this name

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.decoder(code)
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encoder(x)) / self.temperature


@on_ranks()
def test_ddps_wrapper_names_the_module_that_a_script_means() -> None:
    with unitrain.init(backend="ddp", device="cpu", timeout_s=30) as strategy:
        module = Autoencoder()
        model: Any
        model, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        assert model is not module
        with pytest.raises(AttributeError, match=r"of the Autoencoder.*strategy\.unwrap\(model\)\.decode"):
            model.decode(torch.ones(1, 2))
        with pytest.raises(UsageError, match=r"would not see.*set strategy\.unwrap\(model\)\.temperature"):
            model.temperature = 0.5
        with pytest.raises(UsageError, match=r"set strategy\.unwrap\(model\)\.encoder"):
            model.encoder = nn.Linear(4, 2)
        with pytest.raises(AttributeError, match="no attribute 'absent'"):
            model.absent  # noqa: B018
        assert getattr(model, "decode", None) is None
        model.note = "kept"  # what the module does not have is the wrapper's own, as in torch
        model.note = "kept again"
        assert isinstance(copy.deepcopy(model), Autoencoder)
        module.temperature = 0.5
        assert strategy.unwrap(model) is module
        strategy.step(model(torch.ones(2, 4) * (strategy.rank + 1)).square().mean(), optimizer)
        strategy.check_in_sync(model)
