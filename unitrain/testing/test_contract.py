"""Tests the backend that ``--backend`` names against the contract."""

from __future__ import annotations

import pytest

from unitrain.testing.contract import check, parameters
from unitrain.testing.duty import Duty
from unitrain.testing.plugin import WORLDS
from unitrain.testing.worlds import World


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each duty in each world of the backend."""
    worlds = metafunc.config.stash[WORLDS]
    metafunc.parametrize(("world", "duty"), parameters(worlds))


def test_contract(request: pytest.FixtureRequest, world: World, duty: Duty) -> None:
    """A backend passes a duty."""
    check(request, world, duty)
