"""Hosts that change: the run stops once there is a checkpoint, and goes on. The driver: faults/several_hosts."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from places import TESTS
from pretended import PretendedRank, pretended_rank

import unitrain
from unitrain import ConfigError
from unitrain.features.horovod_elastic.hosts import ChangedHosts


class Saves:
    def wait(self) -> None:
        raise AssertionError

    def save_now(self) -> str:
        return "here"


def watched(monkeypatch: pytest.MonkeyPatch, *, elastic: bool) -> tuple[PretendedRank, ChangedHosts, list[Any]]:
    """Return a rank, the feature in it, and the functions that are to be called when hosts change."""
    rank, calls = pretended_rank(), list[Callable[[], None]]()
    backend = rank.sockets.backend
    backend.launch = replace(backend.launch, elastic=elastic)
    monkeypatch.setattr(type(backend), "watch_hosts", lambda self, changed: calls.append(changed))
    hosts = ChangedHosts()
    # At the end of the tests, it would run pytest again in place of this process.
    monkeypatch.setattr(atexit, "register", lambda function: None)
    hosts.plug_in(rank.sockets)
    return rank, hosts, calls


def test_hosts_that_change_early_are_gone_on_with_once_there_is_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, hosts, [changed] = watched(monkeypatch, elastic=True)
    stopping = rank.sockets.stopping
    changed()
    stopping.pass_boundary()
    hosts.at_boundary()
    assert not hosts.goes_on
    stopping.listen(Saves())
    try:
        hosts.at_boundary()
        with pytest.raises(unitrain.Stopped):
            stopping.pass_boundary()
    finally:
        stopping.close()
    assert hosts.goes_on


def test_hosts_are_watched_under_an_elastic_launcher_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, hosts, calls = watched(monkeypatch, elastic=False)
    assert calls == []
    assert hosts not in rank.sockets.hooks


def test_only_a_backend_that_can_goes_on_with_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere, horovodrun would wait for the others as long as they wait for the one that failed."""
    recorded = TESTS / "launch_environments" / "horovodrun-gloo.json"
    for name, value in {**json.loads(recorded.read_text())["environments"][0], "HOROVOD_ELASTIC": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="backend 'ddp' can't go on with other hosts"):
        unitrain.init(backend="ddp")
