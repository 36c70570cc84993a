"""Ranks are killed at random moments, with copies in memory only: each kill costs at most the step that it met.

The job is started again by ``unitrain run`` or torchrun, with as many ranks as before or not, and comes to its end.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from harness import COPIED, HOROVODRUN, MPIRUN, MPIRUN_DDP, TORCHRUN, World, note, worlds
from lives import Killer, assert_undisturbed, begun_again, restarting, train

pytestmark = [pytest.mark.launcher, pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.xdist_group("slurm")]

# The ranks of each start of a job. All but the last are killed.
SAME, OTHER = (3, 3, 3, 3, 3), (2, 3, 2, 3, 1)
SRUN = World("srun", "ddp")


@worlds(TORCHRUN, MPIRUN, MPIRUN_DDP, HOROVODRUN, SRUN)
@pytest.mark.parametrize("plan", [SAME, OTHER], ids=["same", "other"])
def test_a_kill_costs_at_most_a_step(
    world: World, plan: tuple[int, ...], tmp_path: Path, undisturbed: Path, slurm_environ: dict[str, str]
) -> None:
    environ = {**COPIED, "UNITRAIN_BACKEND": world.backend, **(slurm_environ if world == SRUN else {})}
    killer = Killer(tmp_path, plan, random.Random(f"{world} {plan}"))
    output = train(restarting(world, tmp_path, plan), tmp_path, environ, killer.run)

    again = begun_again(tmp_path)
    note(killed=len(killer.met), phases=killer.met, world=str(world), plan=plan, again=again)
    assert len(killer.met) == len(plan) - 1, output
    assert all(steps <= 1 for steps in again), f"{killer.met} {again}\n{output}"
    assert_undisturbed(tmp_path, undisturbed)
