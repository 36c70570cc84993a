"""The contract of backends, run on a simulated accelerator: scripts and duties give tensors of the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import on_device
import pytest
from core_duties import CORE_DUTIES

from unitrain import Strategy
from unitrain.testing.contract import check, parameters
from unitrain.testing.duties import DUTIES
from unitrain.testing.duty import Duty
from unitrain.testing.worlds import World


@dataclass(frozen=True)
class OnDevice(World):
    """A world whose ranks have the simulated device, and train on it."""

    def open(self, **settings: Any) -> Strategy:
        return super().open(**{"device": "sim", **settings})

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 90) -> list[Any]:
        return on_device.run(fn, *args, nprocs=self.processes, timeout=timeout)


# In the default suite: what is nearest to the device.
SHORT = (
    "leaves_no_thread_behind", "reductions", "gathers_and_broadcasts", "nan_in_reductions",
    "trains_as_one_device[plain]", "losses_of_one_trunk", "error_of_one_rank",
)  # fmt: skip
LEFT_OUT = {
    "complex_weights": "the device has no complex views",
    "sparse_gradients": "nor sparse tensors",
    "copies_and_exports": "calls a copy with tensors of the CPU's under the device's autocast",
    "collective_of_one_rank": "the host does not wait in a script's collective, so the library's timeout ends it",
}


def _parameters() -> list[Any]:
    found = []
    duties = [*DUTIES.values(), *CORE_DUTIES.values()]
    for world in (OnDevice("single", 1), OnDevice("ddp", 2), OnDevice("fsdp", 2)):
        for one in parameters([world], on_device.NEEDS_COMPILER, duties=duties):
            name = one.values[1].name
            if name not in LEFT_OUT:
                marks = [] if world.backend == "ddp" and name in SHORT else [pytest.mark.soak]
                found.append(pytest.param(*one.values, id=f"sim-{one.id}", marks=[*one.marks, *marks]))
    return found


@pytest.mark.parametrize(("world", "duty"), _parameters())
def test_contract(request: pytest.FixtureRequest, world: World, duty: Duty) -> None:
    check(request, world, duty)
