"""The registry of prepared modules: found by any wrapper, with the user's parameter names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import unitrain
from unitrain import UsageError
from unitrain.training.models.prepared import PreparedModules


def test_parameters_have_the_names_of_the_user_s_module() -> None:
    prepared = PreparedModules((1, 1))
    module = nn.Linear(2, 2)
    compiled: Any = torch.compile(module, backend="eager")
    prepared.add(compiled, compiled)
    assert prepared.name(module.get_parameter("weight")) == "weight"
    assert prepared.has(module.get_parameter("bias"))
    other = nn.Parameter(torch.ones(3))
    assert not prepared.has(other)
    assert prepared.name(other) == "an unprepared parameter of shape (3,)"


def test_an_optimizer_of_a_copied_model_is_refused_on_one_process() -> None:
    """Each step would say that it stepped, and change nothing."""
    strategy = unitrain.init(backend="single")
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="2 parameters of the optimizer belong to no prepared module"):
        strategy.prepare(model, torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1))
