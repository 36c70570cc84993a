"""The example of a contrastive loss in docs/training/loss.md: it trains the same model on any number of ranks."""

from __future__ import annotations

import re
from typing import Any

import needs
import pytest
import torch
from places import ROOT
from ranks import run_ranks
from torch import Tensor

PAGE = ROOT / "docs" / "training" / "loss.md"


def trained() -> list[Tensor]:
    """Run the example in float64, and return the weights."""
    section = PAGE.read_text().split("## Contrastive losses over the global batch\n")[1]
    (example,) = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    run: dict[str, Any] = {"__name__": "example"}
    exec(example.replace("unitrain.init()", "unitrain.init(precision='fp64', device='cpu')"), run)
    weights = [p.detach().clone() for p in run["model"].parameters()]
    run["strategy"].close()
    return weights


@pytest.mark.parametrize(("launcher", "nprocs"), [("spawn", 3), pytest.param("horovodrun", 2, marks=needs.HOROVOD)])
def test_the_example_trains_the_same_model(launcher: Any, nprocs: int) -> None:
    alone = trained()
    for weights in run_ranks(trained, nprocs=nprocs, launcher=launcher):
        for one, other in zip(weights, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
