"""The contract tests of the built-in backends and a third party's, in every world that can be started here."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from needs import HOROVOD
from ranks import horovodrun_environments

from unitrain.backend import backend_names
from unitrain.commands.verify.trace import Trace
from unitrain.testing.contract import check, parameters
from unitrain.testing.duties import gradients, parity
from unitrain.testing.duty import Duty
from unitrain.testing.worlds import World

PLUGIN = (str(Path(__file__).parent / "plugin"),)
WORLDS = [
    World("single", 1, "python"),
    World("data_parallel", 1, "python"),
    World("ddp", 1, "python"),
    World("ddp", 2),
    World("ddp", 3),
    World("store", 2, path=PLUGIN),
]
WITH_HOROVOD = [World("horovod", size, horovodrun_environments) for size in (2, 3)]


@pytest.mark.parametrize(("world", "duty"), [*parameters(WORLDS), *parameters(WITH_HOROVOD, HOROVOD)])
def test_contract(request: pytest.FixtureRequest, world: World, duty: Duty) -> None:
    check(request, world, duty)


# --------------------------------------------------------------------------------------- what DDP does in its own way


DDP_OPTIONS = (
    {"static_graph": True},
    {"gradient_as_bucket_view": False},
    {"broadcast_buffers": True},
    {"bucket_cap_mb": 1e-4},
    {"find_unused_parameters": True},
)
PLAIN = [replace(parity.CASES[0], settings={"ddp": options}) for options in DDP_OPTIONS]


def train_with_options(world: World) -> list[Trace]:
    return [parity.trains_as_one_device(world, case) for case in PLAIN]


def test_ddp_trains_as_one_device_with_every_option() -> None:
    world = World("ddp", 2)
    by_rank = world.run(train_with_options, world)
    for case, ranks in zip(PLAIN, zip(*by_rank, strict=True), strict=True):
        parity.judge(world, case, ranks)


def what_is_refused(world: World) -> list[str]:
    """The contract lets a backend choose: it trains right, or refuses."""
    return [
        gradients.sparse_gradients(world),
        gradients.losses_of_one_trunk(world),
        gradients.the_module_itself(world),
    ]


def test_ddp_averages_sparse_gradients_and_refuses_what_its_wrapper_does_not_see() -> None:
    world = World("ddp", 2)
    for sparse, trunk, module in world.run(what_is_refused, world):
        assert sparse == ""
        assert "add the losses" in trunk
        assert "Call the model that prepare() returned" in module


# --------------------------------------------------------------------------------------------------------- plug-ins


def test_backend_of_a_third_party_is_listed_but_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in PLUGIN:
        monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "unitrain_store", raising=False)
    assert backend_names() == ["data_parallel", "ddp", "horovod", "single", "store"]
    assert "unitrain_store" not in sys.modules
