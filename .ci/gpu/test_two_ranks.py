"""What two ranks on one GPU show beside the contract: how faults end, and what averaging and BatchNorm cost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import test_ranks_per_batch as parts
import torch
from gpu_world import DEVICE, OnGPU, shared_gpu, world_of
from test_device_faults import train
from test_missing_waits import seconds_in_barrier
from torch import Tensor, nn

import unitrain
from unitrain import CommunicationError, ConfigError
from unitrain.testing.ranks import run_ranks

WORLD = world_of(os.environ.get("GPU_WORLD", "ddp 2").split()[0], 2)


def with_fault(world: OnGPU, fault: Callable[[], object], timeout_s: float) -> None:
    with world.open(timeout_s=timeout_s, precision="fp32") as strategy:
        train(strategy, fault=fault)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("fault", "timeout_s", "ends", "most_s"),
    [
        (kill, 60.0, (CommunicationError,), 30),
        (fail, 60.0, (ZeroDivisionError,), 30),
        (
            partial(time.sleep, 1000),
            5.0,
            (CommunicationError, SystemExit, RuntimeError),
            40,
        ),  # gloo's in DDP's backward
    ],
    ids=["killed", "raises", "hangs"],
)
def test_a_fault_of_one_rank_ends_the_job(
    fault: Callable[[], object], timeout_s: float, ends: Any, most_s: float, capfd: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    with pytest.raises(ends) as ended:
        WORLD.run(with_fault, WORLD, fault, timeout_s, timeout=80)
    took = time.monotonic() - start
    output = capfd.readouterr().out
    with capfd.disabled():
        print(f"\nafter {took:.1f} s: {type(ended.value).__name__}: {str(ended.value)[:300]}")
    assert "rank 1" in output + str(ended.value), output
    assert took < most_s or not DEVICE.startswith("cuda")  # a machine with other work takes longer


def test_a_barrier_holds_the_host() -> None:
    assert WORLD.run(seconds_in_barrier, WORLD)[0] > 0.7


def refused() -> str:
    with pytest.raises(ConfigError) as error:
        unitrain.init(backend="ddp", device=DEVICE, ddp={"communication": "nccl"})
    return str(error.value)


@pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="needs a CUDA GPU")
def test_nccl_is_refused_on_a_gpu_that_ranks_share() -> None:
    for said in run_ranks(refused):
        assert "some of the 2 processes share one" in said


def errors_of_batch_norm(world: OnGPU, of_input: bool) -> list[float]:
    """Return the largest errors of a layer in ``world`` with channels_last: of outputs, and of gradients."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(12, 8, 5, 7, generator=generator, dtype=torch.float64)
    with world.open(sync_batchnorm=True, precision="fp32") as strategy:
        plain = nn.BatchNorm2d(8).double().to(strategy.device)
        layer = strategy.prepare(nn.Sequential(nn.BatchNorm2d(8).double()))
        rank = strategy.rank
        rows = whole[:4] if rank == 0 else whole[4:]
        local, total = (
            part.to(strategy.device, memory_format=torch.channels_last).requires_grad_(of_input)
            for part in (rows, whole)
        )
        output, expected = layer(local), plain(total)
        output.pow(3).sum().backward()
        expected.pow(3).sum().backward()
        part = slice(0, 4) if rank == 0 else slice(4, 12)
        pairs: list[tuple[Any, Any]] = [(output, expected[part])]
        pairs += [
            (strategy.all_reduce(cast(Tensor, p.grad)), q.grad)
            for p, q in zip(layer.parameters(), plain.parameters(), strict=True)
        ]
        if of_input:
            pairs.append((local.grad, cast(Tensor, total.grad)[part]))
        return [(a - b).abs().max().item() for a, b in pairs]


@pytest.mark.parametrize("of_input", [True, False])
def test_synchronised_batch_norm_in_channels_last(of_input: bool) -> None:
    for errors in WORLD.run(errors_of_batch_norm, WORLD, of_input):
        assert max(errors) < 1e-9, errors


def costs(world: OnGPU) -> dict[str, float]:
    """Return milliseconds of a forward and backward of BatchNorm in ``world``, by torch's layer and by ours."""
    batch = (32, 256, 28, 28) if DEVICE.startswith("cuda") else (2, 4, 2, 2)
    took: dict[str, float] = {}
    with world.open(sync_batchnorm=True, precision="fp32") as strategy:
        layers: dict[str, nn.Module] = {"ours": strategy.prepare(nn.Sequential(nn.BatchNorm2d(batch[1])))}
        if DEVICE.startswith("cuda"):
            layers["torch's"] = nn.SyncBatchNorm(batch[1]).to(strategy.device)
        rows = torch.randn(batch).to(strategy.device).requires_grad_()
        for _ in range(4):  # in turns; the first are for warm-up
            for name, layer in layers.items():
                strategy.barrier()
                start = time.perf_counter()
                for _ in range(20):
                    layer(rows).sum().backward()
                strategy.barrier()
                took[name] = min(took.get(name, 1e9), (time.perf_counter() - start) / 20 * 1e3)
    return took


def test_cost_of_synchronised_batch_norm() -> None:
    print("\nms of a layer:", WORLD.run(costs, WORLD)[0])


@pytest.mark.parametrize("data", [(4, 11, "group"), (5, 6, "batch")], ids=["equal parts", "unequal parts"])
def test_parts_of_samples_train_what_whole_samples_do(data: tuple[int, int, str]) -> None:
    settings = {"backend": WORLD.backend, "device": DEVICE, "ranks_per_batch": 2, "sync_batchnorm": True}
    results = run_ranks(shared_gpu, parts.train, (*data, settings))
    parts.assert_same(results, parts.by_hand(*data), parts.EPOCHS * parts.SAMPLES)
