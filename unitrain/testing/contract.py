"""The contract as pytest tests: one test per duty and world, in processes that many duties share.

The first test of a group (``duties.STARTS``) runs all selected duties of its group, and the others report the results.
If a duty fails, hangs or kills its ranks, the processes end, and the next test starts new ones for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from unitrain.testing.attempts import Outcomes, try_duties
from unitrain.testing.duties import DUTIES, STARTS
from unitrain.testing.duty import Duty
from unitrain.testing.worlds import World

_OUTCOMES = pytest.StashKey[Outcomes]()


def parameters(
    worlds: Iterable[World], *marks: pytest.MarkDecorator, duties: Iterable[Duty] = tuple(DUTIES.values())
) -> list[Any]:
    """Return the parameters ``world`` and ``duty`` of a test, for every one of these duties in every world.

    Args:
        worlds: the worlds to test.
        *marks: marks of each test, such as a slow world's.
        duties: the duties; a pair is left out if the duty does not apply to the world.
    """
    return [
        pytest.param(
            world,
            duty,
            id=f"{world}-{duty.name}",
            # With pytest-xdist (--dist loadgroup), a group runs in one of its processes.
            marks=[*marks, pytest.mark.xdist_group(f"{world}-{_together(duty)[0]}")],
        )
        for world in worlds
        for duty in duties
        if duty.needs(world, *duty.arguments)
    ]


def _together(duty: Duty) -> tuple[str, ...]:
    """Return the modules with duties that run in the same processes as this one."""
    return next((modules for modules in STARTS if duty.module in modules), (duty.module,))


def check(request: pytest.FixtureRequest, world: World, duty: Duty) -> None:
    """Fail the calling test if the duty fails in the world. Run the duty first if it has not been run.

    Blocks while the ranks run, up to a minute for each duty that is run.

    Args:
        request: the request of the calling test. The tests after it say which duties are selected.
        world: the parameter ``world`` of the test.
        duty: its parameter ``duty``.
    """
    outcomes = request.config.stash.setdefault(_OUTCOMES, {})
    if (world, duty.name) not in outcomes:
        items = request.session.items
        ahead = [item.callspec.params for item in items[items.index(request.node) :] if hasattr(item, "callspec")]
        others = [params["duty"] for params in ahead if params.get("world") == world and "duty" in params]
        group = [
            other
            for other in others
            if other.module in _together(duty) and other.ending is None and (world, other.name) not in outcomes
        ]
        try_duties(world, [duty] if duty.ending else group, outcomes)
    # Without the traceback of this function, which says nothing of the backend.
    if outcomes[world, duty.name]:
        pytest.fail(outcomes[world, duty.name], pytrace=False)
