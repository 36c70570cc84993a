"""Examples of docs/training/ that train the same model on any number of ranks, of losses, gradients, data and files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import FSDP, HOROVOD
from page_blocks import blocks
from places import ROOT
from ranks import run_ranks
from torch import Tensor

EPOCHS = {"generating": 30, "two-loaders": 6}


def example(page: str, has: str, **settings: Any) -> dict[str, Any]:
    """Run the block of a page that has some text in float64, and return the names that it defines."""
    [block] = [block for block in blocks(ROOT / "docs" / "training" / f"{page}.md") if has in block.text]
    given = "".join(f", {name}={value!r}" for name, value in settings.items() if name != "epochs")
    text = block.text.replace("unitrain.init()", f"unitrain.init(precision='fp64', device='cpu'{given})")
    if "epochs" in settings:
        text = text.replace(f".epochs({EPOCHS[page]})", f".epochs({settings['epochs']})")
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(text.replace("strategy.close()", ""), block.place, "exec", dont_inherit=True), names)
    return names


def weights_of(page: str, has: str) -> list[Tensor]:
    """Return the weights that an example trains."""
    names = example(page, has)
    with names["strategy"]:
        return [p.detach().clone() for p in names["model"].parameters()]


@pytest.mark.parametrize(
    ("page", "has", "launcher", "nprocs"),
    [
        ("loss", "class Towers", "spawn", 3),
        pytest.param("loss", "class Towers", "horovodrun", 2, marks=HOROVOD),
        ("own-gradients", "torch.clamp(overlap", "spawn", 2),
    ],
)
def test_a_loss_of_all_ranks_trains_the_same_model(page: str, has: str, launcher: Any, nprocs: int) -> None:
    alone = weights_of(page, has)
    for weights in run_ranks(weights_of, page, has, nprocs=nprocs, launcher=launcher):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-9)


def trained(page: str, folder: str, backend: str, epochs: int | None = None) -> tuple[dict[str, Tensor], Any]:
    """Run an example in a folder, and return the weights, and what it has written."""
    os.chdir(folder)
    names = example(page, "unitrain.init()", backend=backend, epochs=epochs or EPOCHS[page])
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
        pytest.param("fsdp", "fsdp", marks=FSDP),
    ],
)
def test_two_ranks_train_and_write_the_same_also_after_a_resume(
    alone: tuple[str, Any], first: str, then: str, tmp_path: Path
) -> None:
    page, expected = alone
    run_ranks(trained, page, str(tmp_path), first, 3)
    for result in run_ranks(trained, page, str(tmp_path), then):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)
