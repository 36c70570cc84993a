"""Trainers of many shapes, each as a script would be written: the weights of a plain loop on whole batches.

A new trainer is a file with two functions, ``train`` and ``plain``, that return what they have trained, and a row here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from needs import FSDP, HOROVOD
from ranks import run_ranks
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
)


def differences(backend: str, trainers: list[Trainer], folder: Path) -> dict[str, str]:
    """Run trainers one after another, and return those that have trained something else than their plain loops."""
    wrong = {}
    os.chdir(folder)
    for trainer in trainers:
        script = import_module(trainer.name)
        settings = {**trainer.settings, **({"fsdp": trainer.fsdp} if backend == "fsdp" else {})}
        with unitrain.init(backend=backend, precision="fp64", device="cpu", **settings) as strategy:
            trained = list(_tensors(script.train(strategy), strategy))
        try:
            torch.testing.assert_close(trained, list(_tensors(script.plain())), rtol=0, atol=1e-9)
        except AssertionError as error:
            wrong[trainer.name] = str(error)
    return wrong


def _tensors(values: list[Any], strategy: unitrain.Strategy | None = None) -> Iterator[Tensor]:
    """Yield the weights and buffers of modules, as whole tensors, and other values as they are."""
    for value in values:
        if isinstance(value, nn.Module):
            module = strategy.unwrap(value) if strategy else value
            for tensor in (*module.parameters(), *module.buffers()):
                yield strategy.full_tensor(tensor.detach()) if strategy else tensor.detach()
        else:
            yield torch.as_tensor(value)


class Backends:
    """The differences on each backend, of which one world runs all trainers that tests were selected for."""

    def __init__(self, items: list[pytest.Item], folder: Path) -> None:
        self._parameters = [item.callspec.params for item in items if isinstance(item, pytest.Function)]
        self._folder = folder
        self._differences: dict[str, list[dict[str, str]]] = {}

    def differences(self, backend: str) -> list[dict[str, str]]:
        if backend not in self._differences:
            trainers = [each["trainer"] for each in self._parameters if each["backend"] == backend]
            (folder := self._folder / backend).mkdir()
            self._differences[backend] = run_ranks(differences, backend, trainers, folder)
        return self._differences[backend]


@pytest.fixture(scope="module")
def backends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backends:
    items = [item for item in request.session.items if item.path == request.path]
    return Backends(items, tmp_path_factory.mktemp("trainers"))


def _cases() -> Iterator[Any]:
    for backend, needs in (("ddp", []), ("horovod", [HOROVOD]), ("fsdp", [FSDP])):
        for trainer in TRAINERS:
            if backend != "fsdp" or trainer.fsdp is not None:
                marks = [pytest.mark.all(trainer.horovod)] if backend == "horovod" and trainer.horovod else []
                yield pytest.param(backend, trainer, marks=needs + marks, id=f"{backend}-{trainer.name}")


@pytest.mark.slow("the first of each backend trains them all")
@pytest.mark.parametrize(("backend", "trainer"), list(_cases()))
def test_trains_as_a_plain_loop(backend: str, trainer: Trainer, backends: Backends) -> None:
    for rank, wrong in enumerate(backends.differences(backend)):
        assert trainer.name not in wrong, f"on rank {rank}: {wrong[trainer.name]}"
