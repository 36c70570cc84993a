"""The contract of backends on the GPU. The variable GPU_WORLD names the backend and the number of ranks."""

from __future__ import annotations

import os

import pytest
from core_duties import CORE_DUTIES
from gpu_world import world_of
from needs import FSDP

from unitrain.testing.contract import check, parameters
from unitrain.testing.duties import DUTIES
from unitrain.testing.duty import Duty
from unitrain.testing.worlds import World

BACKEND, RANKS = os.environ.get("GPU_WORLD", "ddp 2").split()
LEFT_OUT = {
    "copies_and_exports": "it calls a copy with tensors of the CPU's under the device's autocast",
    "collective_of_one_rank": "under NCCL the host does not wait in a script's collective",
}
ALL = [duty for duty in (*DUTIES.values(), *CORE_DUTIES.values()) if duty.name not in LEFT_OUT]


pytestmark = [FSDP] if BACKEND == "fsdp" else []


@pytest.mark.parametrize(("world", "duty"), parameters([world_of(BACKEND, int(RANKS))], duties=ALL))
def test_contract(request: pytest.FixtureRequest, world: World, duty: Duty) -> None:
    check(request, world, duty)
