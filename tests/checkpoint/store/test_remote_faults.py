"""Two ranks that save to a server which is slow, dies, or lets nobody in; and ranks that die within an upload."""

from __future__ import annotations

import os
import signal
import time
from uuid import uuid4

import pytest
import torch
from ranks import run_ranks
from s3_server import S3Server
from torch import Tensor, nn

import unitrain
from unitrain import CheckpointError, CommunicationError, Strategy
from unitrain.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture
def url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{uuid4().hex}"


class Run:
    """A run with dropout, whose steps take samples by their number."""

    def __init__(self, strategy: Strategy, url: str) -> None:
        self.strategy = strategy
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.model, self.optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        self.checkpoint: Checkpoint = strategy.checkpoint(url, model=model, optimizer=self.optimizer)

    def step(self) -> None:
        rows = torch.full((2, 4), (self.strategy.global_step + self.strategy.rank) % 3 / 3)
        self.strategy.step(self.model(rows).square().mean(), self.optimizer)

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def save_slowly(url: str, server: int) -> tuple[int, int, bool]:
    """Return the steps while the server answered nothing, and what is resumed after it went on."""
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        run = Run(strategy, url)
        if strategy.is_main:
            os.kill(server, signal.SIGSTOP)
        run.checkpoint.save()
        saved = run.weights
        for _ in range(30):
            run.step()
        steps = strategy.global_step
        if strategy.is_main:
            time.sleep(1)
            os.kill(server, signal.SIGCONT)
        run.checkpoint.wait()
        run.checkpoint.resume()
        return steps, strategy.global_step, torch.equal(run.weights, saved)


def test_training_goes_on_while_a_server_is_slow(url: str, server: S3Server) -> None:
    assert run_ranks(save_slowly, url, server.pid) == [(30, 0, True)] * 2


def lose_the_server(url: str, server: int) -> str:
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        run = Run(strategy, url)
        run.step()
        if strategy.is_main:
            os.kill(server, signal.SIGSTOP)
        run.checkpoint.save()
        if strategy.is_main:
            time.sleep(0.5)  # it waits for an answer
            os.kill(server, signal.SIGKILL)
        try:
            while True:
                run.step()
        except CheckpointError as error:
            return str(error)


def test_a_server_that_dies_within_an_upload_is_an_error_on_every_rank(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = S3Server()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", dying.url)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # else it takes ten seconds until s3fs gives up
        said = run_ranks(lose_the_server, url, dying.pid)
    finally:
        dying.kill()
    assert said[0] == said[1]
    assert url in said[0]
    assert "ConnectionError" in said[0] or "ConnectionClosedError" in said[0]  # refused, or cut within a request


def train(url: str, until: int, server: int | None = None) -> tuple[int, Tensor]:
    """Train from wherever the checkpoint is, and return from where and the weights. With a server, die in a save."""
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        run = Run(strategy, url)
        run.checkpoint.resume()
        begun = strategy.global_step
        while strategy.global_step < until:
            run.step()
            run.checkpoint.save()
        run.checkpoint.wait()
        if server is not None:
            run.step()
            if strategy.is_main:
                os.kill(server, signal.SIGSTOP)
            run.checkpoint.save()
            strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        return begun, run.weights


@pytest.mark.all("two interpreters; test_remote.py ends saves at each moment")
def test_a_run_that_was_killed_within_an_upload_goes_on_bit_for_bit(url: str, server: S3Server) -> None:
    whole = run_ranks(train, f"{url}-whole", 6)[0]
    try:
        with pytest.raises(CommunicationError):
            run_ranks(train, url, 3, server.pid)
    finally:
        server.go_on()
    begun, weights = run_ranks(train, url, 6)[0]
    assert begun == 3
    assert torch.equal(weights, whole[1])


def refused(urls: list[str]) -> list[str]:
    said = []
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        for url in urls:
            try:
                strategy.checkpoint(url, model=nn.Linear(1, 1))
            except CheckpointError as error:
                said.append(str(error))
    return said


def test_what_rank_0_can_not_use_is_told_to_every_rank(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    began = time.monotonic()
    first, second = run_ranks(refused, [url, "s4://bucket/run"])
    assert time.monotonic() - began < 60
    assert first == second
    assert "Unable to locate credentials. Check the credentials" in first[0]
    assert "Protocol not known: s4" in first[1]
