"""Two ranks that save to a server which is slow."""

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

pytestmark = pytest.mark.usefixtures("server")


def save_slowly(url: str, server: int) -> tuple[int, int, bool]:
    """Return the steps while the server answered nothing, and what is resumed after it went on."""
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        model, optimizer = strategy.prepare(module := nn.Linear(4, 1), torch.optim.SGD(module.parameters(), 0.1))
        checkpoint = strategy.checkpoint(url, model=model, optimizer=optimizer)
        if strategy.is_main:
            os.kill(server, signal.SIGSTOP)
        checkpoint.save()
        saved = module.weight.detach().clone()
        for _ in range(30):
            strategy.step(model(torch.ones(2, 4)).square().mean(), optimizer)
        steps = strategy.global_step
        if strategy.is_main:
            time.sleep(1)
            os.kill(server, signal.SIGCONT)
        checkpoint.wait()
        checkpoint.resume()
        return steps, strategy.global_step, torch.equal(module.weight, saved)


def test_training_goes_on_while_a_server_is_slow(s3_url: str, server: S3Server) -> None:
    assert run_ranks(save_slowly, s3_url, server.pid) == [(30, 0, True)] * 2
