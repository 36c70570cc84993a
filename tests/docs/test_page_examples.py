"""The examples of docs/training/generating.md and two-loaders.md train alike on any ranks, also after a resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from page_blocks import blocks
from places import ROOT
from ranks import run_ranks
from torch import Tensor

EPOCHS = {"generating": 30, "two-loaders": 6}


def trained(page: str, folder: str, backend: str, epochs: int | None = None) -> tuple[dict[str, Tensor], Any]:
    """Run an example in float64, and return the weights, and what it has written."""
    os.chdir(folder)
    [block] = [block for block in blocks(ROOT / "docs" / "training" / f"{page}.md") if "unitrain.init(" in block.text]
    text = block.text.replace("unitrain.init()", f"unitrain.init(backend={backend!r}, precision='fp64', device='cpu')")
    text = text.replace(f".epochs({EPOCHS[page]})", f".epochs({epochs or EPOCHS[page]})")
    text = text.replace("strategy.close()", "")
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(text, block.place, "exec", dont_inherit=True), names)
    with names["strategy"] as strategy:
        written = None
        if page == "generating":
            written = names["samples"].tolist(), names["progress"]
            last = names["epoch"] - (names["progress"]["epochs_since"] > 1)
            drawn = torch.get_rng_state()
            assert names["write"](last).tolist() == written[0]
            assert torch.equal(torch.get_rng_state(), drawn), "the samples draw from the generator of the run"
        return strategy.export(names["model"]).state_dict(), written


@pytest.fixture(scope="module", params=list(EPOCHS))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Return a page, and what its example trains and writes in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp(request.param))
        return request.param, trained(request.param, os.getcwd(), "single")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param("ddp", "horovod", marks=HOROVOD),
        pytest.param("horovod", "ddp", marks=[HOROVOD, pytest.mark.all("as in the other order")]),
        ("fsdp", "fsdp"),
    ],
)
def test_two_ranks_train_and_write_the_same_also_after_a_resume(
    alone: tuple[str, Any], first: str, then: str, tmp_path: Path
) -> None:
    page, expected = alone
    run_ranks(trained, page, str(tmp_path), first, 3)
    for result in run_ranks(trained, page, str(tmp_path), then):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)
