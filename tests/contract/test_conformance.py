"""The contract tests of the built-in backends and a third party's, in every world that can be started here."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from core_duties import CORE_DUTIES
from needs import FSDP, HOROVOD
from places import TESTS
from ranks import horovodrun_environments

from unitrain.communication.backend import backend_names
from unitrain.testing.contract import check, parameters
from unitrain.testing.duties import DUTIES, parity
from unitrain.testing.duty import Duty
from unitrain.testing.parity.cases import Trace
from unitrain.testing.worlds import World

PLUGIN = str(TESTS / "plugin")
ALL = (*DUTIES.values(), *CORE_DUTIES.values())
EVERY_MODULE = frozenset(duty.module for duty in ALL)
OF_BACKENDS = EVERY_MODULE - {"core_duties"}  # which depend least on the backend
SHORT = frozenset({"parity", "lifecycle"})
# Its process groups are those of ddp, which is held to the other duties.
OF_SHARDS = frozenset({"gradients", "parity", "preparation"})


def of_world(world: World, modules: Collection[str], *marks: pytest.MarkDecorator) -> list[Any]:
    """Return the duties of a world. ``make test`` runs those of some modules, ``make test-all`` the others."""
    now = pytest.mark.slow("the first duty of a group runs all of the group")
    later = pytest.mark.all("ddp and horovod with 2 ranks are held to every duty in make test")
    return [
        pytest.param(*one.values, id=one.id, marks=[*one.marks, now if one.values[1].module in modules else later])
        for one in parameters([world], *marks, duties=ALL)
    ]


with pytest.MonkeyPatch.context() as with_plugin:
    with_plugin.syspath_prepend(PLUGIN)
    # The rest of a plug-in's duties is what test_conform.py runs, as its author would.
    OF_PLUGIN = of_world(World("store", 2), {"lifecycle"})
DUTIES_IN_WORLDS = [
    *OF_PLUGIN,
    *of_world(World("single", 1, "python"), SHORT),
    *of_world(World("data_parallel", 1, "python"), SHORT),
    *of_world(World("ddp", 1, "python"), SHORT),
    *of_world(World("ddp", 2), EVERY_MODULE),
    *of_world(World("horovod", 2, horovodrun_environments), OF_BACKENDS, HOROVOD),
    *of_world(World("fsdp", 2), OF_SHARDS, FSDP),
    *of_world(World("ddp", 3), ()),
    *of_world(World("horovod", 3, horovodrun_environments), (), HOROVOD),
    *of_world(World("fsdp", 3), (), FSDP),
]


@pytest.fixture(autouse=True)
def plugin_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLUGIN)


@pytest.mark.parametrize(("world", "duty"), DUTIES_IN_WORLDS)
def test_contract(request: pytest.FixtureRequest, world: World, duty: Duty) -> None:
    check(request, world, duty)


DDP_OPTIONS = (
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


def test_backend_of_a_third_party_is_listed_but_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "unitrain_store", raising=False)
    assert backend_names() == ["data_parallel", "ddp", "fsdp", "horovod", "single", "store"]
    assert "unitrain_store" not in sys.modules
