"""One contract for every backend, the built-in and a third party's, in every world that can be made here."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contract
import pytest
from contract import World
from needs import HOROVOD

from unitrain import CommunicationError

WORLDS = {
    "single": World("single", 1),
    "data_parallel": World("data_parallel", 1),
    "ddp-x1": World("ddp", 1),
    "ddp-x2": World("ddp", 2),
    "ddp-x3": World("ddp", 3),
    "horovod-gloo-x2": World("horovod", 2, "horovodrun"),
    "horovod-gloo-x3": World("horovod", 3, "horovodrun"),
    "plugin-x2": World("store", 2),
}


def worlds_of(*sizes: int) -> list[Any]:
    """Return the worlds of so many processes, as parameters of the fixture."""
    return [
        pytest.param(world, id=name, marks=[HOROVOD] if world.backend == "horovod" else [])
        for name, world in WORLDS.items()
        if world.processes in sizes
    ]


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install the third party's distribution into a folder of its own, and return it."""
    source = tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(Path(__file__).parent / "plugin", source)
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--disable-pip-version-check", "--target", target, source], check=True)
    return str(target)


@pytest.fixture(params=worlds_of(1, 2, 3))
def world(request: pytest.FixtureRequest) -> World:
    chosen: World = request.param
    if chosen.backend == "store":
        return dataclasses.replace(chosen, path=request.getfixturevalue("plugin"))
    return chosen


# Duties that the same processes do in turn: to start processes takes as long as most duties do.
DUTIES: dict[str, tuple[Callable[[World], None], ...]] = {
    "collectives": (
        contract.reductions,
        contract.gathers_and_broadcasts,
        contract.refused_reductions,
        contract.objects,
        contract.meters,
    ),
    "modes": (contract.trains_as_one_device,),
    "precisions": (contract.precisions,),
    "parameters": (
        contract.unused_parameters,
        contract.unused_parameters_beside_batch_norm,
        contract.tied_and_frozen,
        contract.complex_weights,
        contract.sparse_gradients,
        contract.optimizers_that_come_and_change,
    ),
    "several": (
        contract.several_losses_and_optimizers,
        contract.windows_without_a_loader,
        contract.optimizers_of_one_model,
        contract.losses_of_one_trunk,
        contract.gradients_in_the_step_s_hook,
    ),
    "batches": (contract.nan_in_an_empty_batch_is_no_news, contract.nan_of_a_rank_without_tokens_is_no_news),
    "apart": (contract.the_module_itself, contract.steps_by_hand, contract.nothing_after_close),
    "models": (contract.preparation, contract.copies_and_exports, contract.compiled, contract.evaluation),
}


@pytest.mark.parametrize("kind", DUTIES)
def test_contract(world: World, kind: str) -> None:
    world.run(contract.in_turn, DUTIES[kind])


def test_rank_0_io(world: World, tmp_path: Path) -> None:
    world.run(contract.rank_0_io, tmp_path)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_adversaries(world: World, accumulate: int) -> None:
    world.run(contract.adversaries, accumulate)


@pytest.mark.parametrize("policy", ["stop", "skip", "raise"])
def test_not_finite(world: World, policy: str) -> None:
    world.run(contract.not_finite, policy)


@pytest.mark.parametrize("world", worlds_of(2, 3), indirect=True)
def test_different_models(world: World) -> None:
    world.run(contract.different_models)


@pytest.mark.parametrize("world", worlds_of(2), indirect=True)  # each takes what a collective may wait
def test_collective_of_one_rank(world: World) -> None:
    # Horovod's gloo may not give up by itself; then the ranks that do not come are ended.
    said = r"rank 0 .*all_reduce: .*rank 1 on .* is in its own code|rank \d .* left with exit code 1"
    with pytest.raises(CommunicationError, match=said):
        world.run(contract.collective_of_one_rank)


def test_options_of_ddp() -> None:
    World("ddp", 2).run(contract.options_of_ddp)


def test_backend_of_a_third_party_is_small(plugin: str) -> None:
    assert len((Path(plugin) / "unitrain_store.py").read_text().splitlines()) < 80


def _names_and_modules(path: str) -> Any:
    sys.path.insert(0, path)
    before = set(sys.modules)
    from unitrain.backend import backend_names

    return backend_names(), sorted(name for name in set(sys.modules) - before if "store" in name)


def test_backend_of_a_third_party_is_listed_but_not_imported(plugin: str) -> None:
    from ranks import run_ranks

    [(names, imported)] = run_ranks(_names_and_modules, plugin, nprocs=1)
    assert names == ["data_parallel", "ddp", "horovod", "single", "store"]
    assert imported == []
