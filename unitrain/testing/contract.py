"""The contract as tests: every duty of every world is one, though the ranks of a world are started only a few times.

Starting processes takes longer than most duties do. So the first test of a group (``duties.STARTS``) has all duties of
its group done that are to be tested, by the same processes, one after another; the tests after it report what became of
theirs. Where a duty fails, hangs or kills its ranks, the processes end with it. The next test starts new ones for the
rest.
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
    """Return every duty of every world as parameters of a test: ``world`` and ``duty``.

    Args:
        worlds: where the contract is to hold.
        *marks: given to each test.
    """
    return [
        pytest.param(
            world,
            duty,
            id=f"{world}-{duty.name}",
            # With pytest-xdist (--dist loadgroup), one of its processes runs them.
            marks=[*marks, pytest.mark.xdist_group(f"{world}-{_together(duty)[0]}")],
        )
        for world in worlds
        for duty in DUTIES.values()
        if duty.needs(world)
    ]


def _together(duty: Duty) -> tuple[str, ...]:
    """Return the modules whose duties are done in one start with this one."""
    return next(modules for modules in STARTS if duty.module in modules)


def check(request: pytest.FixtureRequest, world: World, duty: Duty) -> None:
    """Fail the test that asks where the duty is not done in the world."""
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
        again = f"{failure.owed}\n{failure.error}\n{first} fails in the same way: its test says more."
        pytest.fail(str(failure) if first == duty.name else again, pytrace=False)


def _first_alike(failure: Failure, world: World, outcomes: Outcomes) -> str:
    """Return the first duty of a world that failed with the same error, but for numbers in it: this one, perhaps."""
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
