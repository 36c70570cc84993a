"""The contract as pytest tests: one test per duty and world, in processes that many duties share.

Starting processes takes longer than most duties. So the first test of a group (``duties.STARTS``) runs all selected
duties of its group in the same processes, one after another, and the other tests of the group report the results. If a
duty fails, hangs or kills its ranks, the processes end, and the next test starts new ones for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

from unitrain.testing.attempts import Failure, Outcomes, try_duties
from unitrain.testing.duties import DUTIES, STARTS
from unitrain.testing.duty import Duty
from unitrain.testing.worlds import World

_OUTCOMES = pytest.StashKey[Outcomes]()


def parameters(worlds: Iterable[World], *marks: pytest.MarkDecorator) -> list[Any]:
    """Return the parameters ``world`` and ``duty`` of a test, for every duty of every world."""
    return [
        pytest.param(
            world,
            duty,
            id=f"{world}-{duty.name}",
            # With pytest-xdist (--dist loadgroup), a group runs in one of its processes.
            marks=[*marks, pytest.mark.xdist_group(f"{world}-{_together(duty)[0]}")],
        )
        for world in worlds
        for duty in DUTIES.values()
        if duty.needs(world)
    ]


def _together(duty: Duty) -> tuple[str, ...]:
    """Return the modules whose duties run in the same processes as this one."""
    return next(modules for modules in STARTS if duty.module in modules)


def check(request: pytest.FixtureRequest, world: World, duty: Duty) -> None:
    """Fail the calling test if the duty fails in the world. Run the duty first if it has not been run."""
    outcomes = request.config.stash.setdefault(_OUTCOMES, {})
    if (world, duty.name) not in outcomes:
        items = request.session.items
        ahead = [item.callspec.params for item in items[items.index(request.node) :] if hasattr(item, "callspec")]
        others = [one["duty"] for one in ahead if one.get("world") == world and "duty" in one]
        group = [
            other
            for other in others
            if other.module in _together(duty) and other.ending is None and (world, other.name) not in outcomes
        ]
        try_duties(world, [duty] if duty.ending else group, outcomes)
    failure = outcomes[world, duty.name]
    if failure is not None:
        first = _first_alike(failure, world, outcomes)
        again = f"{failure.title}\n{failure.error}\nThe duty {first} fails with the same error: see its test."
        pytest.fail(str(failure) if first == duty.name else again, pytrace=False)


def _first_alike(failure: Failure, world: World, outcomes: Outcomes) -> str:
    """Return the first duty of a world that failed with the same error, ignoring numbers; it may be this one."""
    alike = [
        name
        for (where, name), other in outcomes.items()
        if where == world
        and other is not None
        and (other is failure or (failure.error and _without_numbers(other) == _without_numbers(failure)))
    ]
    return alike[0]


def _without_numbers(failure: Failure) -> str:
    return re.sub(r"\d+", "", failure.error)
