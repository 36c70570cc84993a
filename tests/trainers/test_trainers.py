"""Trainers of many shapes, each as a script would be written: the weights of a plain loop on whole batches.

A new trainer is a file with a function ``train`` that returns what it has trained, and a row here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from needs import FSDP, HOROVOD
from places import ROOT
from ranks import run_ranks
from tiny import Plain
from torch import Tensor, nn

import unitrain


class Trainer(NamedTuple):
    """A script of this folder.

    Attributes:
        name: its module.
        settings: of its strategy.
        fsdp: of its strategy under fsdp, or None if it can't train shards.
        horovod: why its test on Horovod is left to make test-all.
    """

    name: str
    settings: dict[str, Any] = {}
    fsdp: dict[str, Any] | None = {}
    horovod: str = ""


PENALTY = {"reshard_after_backward": False}
TRAINERS = (
    Trainer("moco"),
    Trainer("dino"),
    Trainer("lora_distillation", horovod="its ranks would import peft, too"),
    Trainer("curriculum"),
    Trainer("wgan", fsdp=PENALTY),
    Trainer("two_loaders"),
    Trainer("generation"),
    Trainer("lr_finder_swa", {"sync_batchnorm": True}, fsdp=None),
    Trainer("pinn", fsdp=PENALTY),
    Trainer("k_fold"),
    Trainer("pcgrad", fsdp=None),
    Trainer("gradient_noise"),
    Trainer("gradnorm", fsdp=None),
    Trainer("reptile", fsdp=None),
    Trainer("evolution", fsdp=None),
    Trainer("maml", fsdp=None),
    Trainer("lbfgs"),
    Trainer("sam"),
    Trainer("active_learning"),
    Trainer("self_training"),
)


def differences(backend: str, trainers: list[Trainer], folder: Path) -> dict[str, str]:
    """Run trainers one after another, and return those that have trained something else than their plain loops."""
    wrong = {}
    os.chdir(folder)
    for trainer in trainers:
        script = import_module(trainer.name)
        settings = {**trainer.settings, **({"fsdp": trainer.fsdp} if backend == "fsdp" else {})}
        with unitrain.init(backend=backend, precision="fp64", device="cpu", **settings) as strategy:
            trained = _tensors(strategy, script.train(strategy))
        expected = _tensors(plain := Plain(), script.train(plain))
        try:
            torch.testing.assert_close(trained, expected, rtol=0, atol=1e-9)
        except AssertionError as error:
            wrong[trainer.name] = str(error)
    return wrong


def _tensors(strategy: Any, values: list[Any]) -> list[Tensor]:
    """Return the weights and buffers of modules, as whole tensors, other values, and the number of steps."""
    tensors = []
    for value in [*values, strategy.global_step]:
        if isinstance(value, nn.Module):
            module = strategy.unwrap(value)
            tensors += [strategy.full_tensor(tensor.detach()) for tensor in (*module.parameters(), *module.buffers())]
        else:
            tensors.append(torch.as_tensor(value))
    return tensors


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function of a backend: the differences on each rank of one world that runs all selected trainers."""

    @cache
    def run(backend: str) -> list[dict[str, str]] | Exception:
        items = [item for item in request.session.items if item.path == request.path]
        cases = [item.callspec.params for item in items if hasattr(item, "callspec")]
        trainers = [case["trainer"] for case in cases if case["backend"] == backend]
        try:
            return run_ranks(differences, backend, trainers, tmp_path_factory.mktemp(backend))
        except Exception as error:
            return error

    return run


def _cases() -> Iterator[Any]:
    for backend, needs in (("ddp", []), ("horovod", [HOROVOD]), ("fsdp", [FSDP])):
        for trainer in TRAINERS:
            if backend != "fsdp" or trainer.fsdp is not None:
                marks = [pytest.mark.all(trainer.horovod)] if backend == "horovod" and trainer.horovod else []
                yield pytest.param(backend, trainer, marks=needs + marks, id=f"{backend}-{trainer.name}")


def test_the_table_of_trainers_has_each_script() -> None:
    rows = re.findall(r"`(\w+)\.py` \|$", (ROOT / "docs" / "choosing.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(trainer.name for trainer in TRAINERS)


@pytest.mark.slow("the first of each backend trains them all")
@pytest.mark.parametrize(("backend", "trainer"), list(_cases()))
def test_trains_as_a_plain_loop(backend: str, trainer: Trainer, outcome: Callable[[str], Any]) -> None:
    if isinstance(ranks := outcome(backend), Exception):
        raise ranks
    assert [wrong.get(trainer.name) for wrong in ranks] == [None, None]
