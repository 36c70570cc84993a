"""Two ranks that save to a server which is slow or dies."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from ranks import run_ranks
from s3_server import S3Server
from torch import nn

import unitrain
from unitrain import CheckpointError, Strategy
from unitrain.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("server")


class Run:
    """A run whose steps take samples by their number."""

    def __init__(self, strategy: Strategy, url: str) -> None:
        self.strategy = strategy
        model = nn.Linear(4, 1)
        self.model, self.optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        self.checkpoint: Checkpoint = strategy.checkpoint(url, model=model, optimizer=self.optimizer)

    def step(self) -> None:
        rows = torch.full((2, 4), (self.strategy.global_step + self.strategy.rank) % 3 / 3)
        self.strategy.step(self.model(rows).square().mean(), self.optimizer)


def save_slowly(url: str, server: int) -> tuple[int, int, bool]:
    """Return the steps while the server answered nothing, and what is resumed after it went on."""
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        run = Run(strategy, url)
        if strategy.is_main:
            os.kill(server, signal.SIGSTOP)
        run.checkpoint.save()
        saved = strategy.export(run.model).weight.clone()
        for _ in range(30):
            run.step()
        steps = strategy.global_step
        if strategy.is_main:
            time.sleep(1)
            os.kill(server, signal.SIGCONT)
        run.checkpoint.wait()
        run.checkpoint.resume()
        return steps, strategy.global_step, torch.equal(strategy.unwrap(run.model).weight, saved)


def test_training_goes_on_while_a_server_is_slow(s3_url: str, server: S3Server) -> None:
    assert run_ranks(save_slowly, s3_url, server.pid) == [(30, 0, True)] * 2


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
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = S3Server()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", dying.url)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # else it takes ten seconds until s3fs gives up
        said = run_ranks(lose_the_server, s3_url, dying.pid)
    finally:
        dying.kill()
    assert said[0] == said[1]
    assert s3_url in said[0]
    assert "ConnectionError" in said[0] or "ConnectionClosedError" in said[0]  # refused, or cut within a request
