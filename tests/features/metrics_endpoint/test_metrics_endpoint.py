"""What ``metrics.port`` serves of heartbeats, a job and what a script logs."""

from __future__ import annotations

import math
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from plain_loop import model_of
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ranks import run_ranks
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

import unitrain
from unitrain import ConfigError, call_site
from unitrain.features.metrics_endpoint.endpoint import Endpoint
from unitrain.features.trackers import Trackers
from unitrain.job.watch.hub import Member
from unitrain.job.watch.messages import Heartbeat
from unitrain.pulse import USER_CODE, Pulse

DEADLINE_S = 30.0


def opened(ranks: int, port: int = 0) -> Endpoint:
    endpoint = Endpoint("127.0.0.1", port)
    endpoint.open([Member(rank, f"node{rank // 8}", 1, 0) for rank in range(ranks)], Pulse())
    return endpoint


@pytest.fixture
def three() -> Iterator[Endpoint]:
    endpoint = opened(3)
    yield endpoint
    endpoint.at_close()


def served(port: int) -> dict[tuple[str, ...], float]:
    """Return what a port serves."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        return by_name(text_string_to_metric_families(answer.read().decode()))


def samples(endpoint: Endpoint) -> dict[tuple[str, ...], float]:
    """Return what an endpoint would serve."""
    return by_name(endpoint.collect())


def by_name(families: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    """Return all samples by name and labels, without the host."""
    found = [sample for family in families for sample in family.samples]
    labels = [[value for name, value in sorted(sample.labels.items()) if name != "host"] for sample in found]
    return {
        (sample.name.removeprefix("unitrain_"), *its): sample.value for sample, its in zip(found, labels, strict=True)
    }


def beat(phase: str = USER_CODE, steps: int = 0, **more: Any) -> Heartbeat:
    return Heartbeat(phase, 100 + steps, 0.0, trained=(steps, 0), **more)


def test_what_heartbeats_show(three: Endpoint) -> None:
    now = time.monotonic() - 50
    for second in range(40):
        three.observe(0, beat("step", 2 * second, memory=1000), now + second)
        three.observe(1, beat("step" if second % 2 else USER_CODE, 2 * second, loads=True), now + second)
    found = samples(three)
    assert found["ranks",] == 3
    assert found["step", "0"] == 178
    assert found["seconds_per_step", "0"] == pytest.approx(0.5)
    assert (found["waiting_ratio", "0"], found["waiting_ratio", "1"]) == pytest.approx((1, 0.5))
    assert 11 <= found["heartbeat_age_seconds", "0"] < 11 + DEADLINE_S
    assert found["resident_memory_bytes", "0"] == 1000
    assert found["phase", "step", "1"] == 1
    assert not any("2" in labels for labels in found), "it has not sent any"
    three.observe(1, beat(loads=True), now)
    assert samples(three)["phase", "data", "1"] == 1
    three.observe(1, beat(), now)
    assert samples(three)["phase", USER_CODE, "1"] == 1


def test_a_step_of_minutes_and_a_resumed_run(three: Endpoint) -> None:
    for second in range(200):
        three.observe(0, Heartbeat("step", 5000 + second // 60, 0.0, trained=(second // 60, 0)), float(second))
    assert samples(three)["seconds_per_step", "0"] == 60


@pytest.mark.parametrize(("waits", "slowest"), [((0.9, 0.9, 0.3), 2), ((0.5, 0.4, 0.45), None), ((0, 0, 0), None)])
def test_the_rank_that_the_others_wait_for(three: Endpoint, waits: tuple[float, ...], slowest: int | None) -> None:
    for second in range(60):
        for rank, share in enumerate(waits):
            three.observe(rank, beat("step" if second % 10 < 10 * share else USER_CODE, second), float(second))
    assert samples(three).get(("slowest_rank",)) == slowest


def test_what_the_script_logs(three: Endpoint) -> None:
    three.logged({"loss": 2.0, "val/accuracy": float("nan")})
    three.logged({"loss": 1.0})
    found = samples(three)
    assert found["logged", "loss"] == 1
    assert math.isnan(found["logged", "val/accuracy"])


def test_a_forked_child_does_not_keep_the_port() -> None:
    first = opened(1)
    port = first.port
    child = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    child.start()
    try:
        first.at_close()
        opened(1, port).at_close()
        assert child.is_alive()
    finally:
        child.kill()
        child.join()


def in_a_job() -> dict[tuple[str, ...], float]:
    """Train and log, and return what is served once all ranks are seen after step 3."""
    with unitrain.init(device="cpu", metrics={"port": 0}) as strategy:
        model, optimizer = strategy.prepare(module := model_of().float(), SGD(module.parameters(), lr=0.1))
        trackers = strategy.add(Trackers([], "runs"))
        for step in range(3):
            loss = model(torch.ones(1, 4) * step + strategy.rank).square().mean()
            strategy.step(loss, optimizer)
        trackers.log({"loss": loss}, strategy.global_step)
        found: dict[tuple[str, ...], float] = {}
        deadline = time.monotonic() + DEADLINE_S
        steps = [("step", str(rank)) for rank in range(strategy.world_size)]
        for endpoint in (hook for hook in strategy._hooks if isinstance(hook, Endpoint)):
            while [found.get(step) for step in steps] != [3] * strategy.world_size:
                assert time.monotonic() < deadline
                found = served(endpoint.port)
        strategy.barrier()
    return found


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_job(nprocs: int) -> None:
    found = run_ranks(in_a_job, nprocs=nprocs)[0]
    assert found["logged", "loss"] >= 0
    assert all(found["resident_memory_bytes", str(rank)] > 2**20 for rank in range(nprocs))


def test_without_the_library_no_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r'pip install "unitrain\[metrics\]"'):
        unitrain.init(device="cpu", metrics={"port": 0})


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"], ids=["a port that is taken", "another host"])
def test_an_address_that_can_not_be_served(three: Endpoint, host: str) -> None:
    with pytest.raises(ConfigError, match=rf"can't serve metrics at {host}, port {three.port}, .*address"):
        unitrain.init(device="cpu", metrics={"port": three.port, "host": host})


class Asked(Dataset[bool]):
    """Returns whether the main thread is seen to wait for a batch while it reads a sample."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> bool:
        return call_site.is_loading(threading.main_thread().ident or 0)


def test_what_counts_as_loading() -> None:
    with unitrain.init(device="cpu") as strategy:
        for loader in (strategy.dataloader(Asked(), global_batch_size=1), DataLoader(Asked())):
            for seen in loader:
                assert seen.item()
                assert not call_site.is_loading(threading.main_thread().ident or 0)
