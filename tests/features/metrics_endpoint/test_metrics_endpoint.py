"""What ``metrics.port`` serves of heartbeats, a job and what a script logs, and what ``unitrain top`` shows of it."""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import model_of
from ranks import run_ranks
from rich.console import Console
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

import unitrain
from unitrain import ConfigError, call_site
from unitrain.commands.cli import main
from unitrain.features.metrics_endpoint import FILE
from unitrain.features.metrics_endpoint.endpoint import Endpoint
from unitrain.features.metrics_endpoint.view import View, find
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


def samples(collector: Endpoint) -> dict[tuple[str, ...], float]:
    """Return all samples by name and labels, without the host."""
    found = [sample for family in collector.collect() for sample in family.samples]
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


def in_a_job(folder: Path) -> list[int]:
    """Train and log, and return the ranks that are seen after step 3."""
    with unitrain.init(device="cpu", metrics={"port": 0}) as strategy:
        model, optimizer = strategy.prepare(module := model_of().float(), SGD(module.parameters(), lr=0.1))
        strategy.checkpoint(folder / "checkpoints", model=model, optimizer=optimizer)
        trackers = strategy.add(Trackers([], folder))
        for step in range(3):
            loss = model(torch.ones(1, 4) * step + strategy.rank).square().mean()
            strategy.step(loss, optimizer)
        trackers.log({"loss": loss}, strategy.global_step)
        view = View(*find(str(folder))) if strategy.is_main else None
        deadline = time.monotonic() + DEADLINE_S
        while view is not None and [r["step"] for r in view.ranks.values()] != [3] * strategy.world_size:
            assert time.monotonic() < deadline
            view.ask()
        if view is not None:
            assert view.values[" loss"] >= 0
            assert all(rank["resident_memory_bytes"] > 2**20 for rank in view.ranks.values())
            assert json.loads((folder / FILE).read_text()) == json.loads((folder / "checkpoints" / FILE).read_text())
        strategy.barrier()
    return sorted(view.ranks) if view else []


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_job(nprocs: int, tmp_path: Path) -> None:
    assert run_ranks(in_a_job, tmp_path, nprocs=nprocs)[0] == list(range(nprocs))
    assert not list(tmp_path.rglob(FILE))


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


RANKS = 300
SILENT, SLOW = 77, 205


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    """A job of 300 ranks: rank 77 is silent, and the others wait for rank 205."""
    made = opened(RANKS)
    now = time.monotonic() - 100
    for second in range(100):
        for rank in range(RANKS):
            if rank != SILENT or second < 50:
                phase = USER_CODE if rank == SLOW else "step"
                made.observe(rank, beat(phase, second, memory=2 * 10**9), now + second)
    made.logged({"loss": 0.25})
    yield made
    made.at_close()


def test_once(endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint.at_folder(tmp_path / "checkpoints")
    for target in (f"127.0.0.1:{endpoint.port}", str(tmp_path / "checkpoints"), str(tmp_path)):
        assert main(["top", "--once", target]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split("   ") == ["step 199", "ranks: 300", "hosts: 38", f"the others wait for rank {SLOW}"]
        assert lines[2].split() == ["rank", "host", "step", "s/step", "in", "waits", "memory", "heard"]
        assert re.fullmatch(r" *0  node0 +199 +1  step +100% +2.0 GB +\d+ s ago *", lines[3])
        assert len([line for line in lines if " s ago" in line]) == RANKS
        assert re.search(r"^loss +0.25$", "\n".join(lines), re.MULTILINE)


@pytest.mark.parametrize("width", [80, 120])
def test_of_many_ranks_those_that_matter_are_shown(endpoint: Endpoint, width: int) -> None:
    view = View("127.0.0.1", endpoint.port)
    for _ in range(3):
        view.ask()
    console = Console(width=width)
    with console.capture() as captured:
        console.print(view.shown(24))
    lines = captured.get().splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if line.rstrip().endswith("s ago")][:2] == [str(SILENT), str(SLOW)]
    assert "17 shown" in lines[0]


def refused(capsys: pytest.CaptureFixture[str], *targets: str) -> str:
    assert main(["top", *targets]) == 1
    [line] = capsys.readouterr().err.splitlines()
    return line.removeprefix("unitrain top: ")


def announced(folder: Path, **changed: object) -> str:
    """Leave the address of a job that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    found = {"address": "127.0.0.1", "port": port, "id": "a", "host": socket.gethostname(), **changed}
    (folder / FILE).write_text(json.dumps(found))
    return str(folder)


@pytest.mark.parametrize("target", ["runs/none", "host", ":9400", "host:", "host:65536", "s3://bucket/run"])
def test_a_target_that_is_none(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, target) == f"{target} is neither the folder of a run nor HOST:PORT."


def test_a_folder_without_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file or directory" in refused(capsys, str(tmp_path))
    for text in ("{", "[]", "{}", '{"address": "a", "port": "b", "host": "c"}'):
        (tmp_path / FILE).write_text(text)
        assert "does a job with metrics.port run in" in refused(capsys, str(tmp_path))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {},
            r"no job answers at 127.0.0.1, port \d+, the address in .* \(Connection refused\).*was killed",
        ),
        ({"port": None}, "another job answers at"),
        (
            {"host": "node1", "port": 9400},
            r"runs on node1.*ssh -N -L 9400:127.0.0.1:9400 node1 here, and .* localhost:9",
        ),
        (
            {"host": "node1.invalid", "address": "0.0.0.0", "port": 9400},
            "no job answers at node1.invalid, port 9400",
        ),
    ],
    ids=["has ended", "another", "another host", "unknown host"],
)
def test_an_address_that_was_left(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], said: str
) -> None:
    changed = {name: value or endpoint.port for name, value in changed.items()}
    assert re.search(said, refused(capsys, announced(tmp_path, **changed)))


def test_another_service_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        said = refused(capsys, f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert said.startswith(f"no job answers at 127.0.0.1, port {server.server_port} (")


def test_without_the_library(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # as if it were not installed
    assert main(["top", "host:1"]) == 2
    assert 'pip install "unitrain[metrics]"' in capsys.readouterr().err


def in_terminal(target: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the live view in a terminal of 80 columns, and return it and the terminal's other end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "unitrain.commands.cli", "top", target]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    return process, ours


def read_until(terminal: int, text: str) -> str:
    """Return what is written to a terminal until a text comes, or all of it."""
    seen = ""
    with suppress(OSError):  # the other end has been closed
        while text not in seen:
            seen += os.read(terminal, 2**16).decode(errors="replace")
    return seen


def test_a_job_that_ends_meanwhile() -> None:
    endpoint = opened(1)
    process, terminal = in_terminal(f"127.0.0.1:{endpoint.port}")
    assert "user code" in read_until(terminal, "s ago")
    endpoint.at_close()
    left = read_until(terminal, "\0")
    assert process.wait(60) == 0
    os.close(terminal)
    assert "The job has ended, or can't be reached any more: no job answers at 127.0.0.1" in left
    assert "user code" in left.rpartition("\x1b[?1049l")[2], "the last state stays in the terminal"


def test_ctrl_c_ends_it(endpoint: Endpoint) -> None:
    process, terminal = in_terminal(f"127.0.0.1:{endpoint.port}")
    read_until(terminal, "s ago")
    process.send_signal(signal.SIGINT)
    read_until(terminal, "\0")
    assert process.wait(60) == 0
    os.close(terminal)
