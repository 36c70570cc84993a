"""Training by UniTrain, run on a simulated accelerator, gives the CPU's numbers to the digit.

Its autocast has a GPU's lists of operators, by which cross-entropy is computed in fp32. On the CPU it is not, so here
logits are converted before it.
"""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import NEEDS_COMPILER, run, sim
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import unitrain
from unitrain.features.batch_finder.find_micro_batch_size import find_micro_batch_size
from unitrain.features.ema import EMA
from unitrain.features.throughput import Throughput
from unitrain.testing.parity import cases, trial
from unitrain.testing.parity.cases import CASES, Case

pytestmark = NEEDS_COMPILER
BY_NAME = {case.name: case for case in CASES}
NORMALISED = replace(BY_NAME["bf16"], name="normalised_bf16", batch_norm=True)
NORMALISED.settings.update(sync_batchnorm=True)
CHOSEN = {
    "ddp": (NORMALISED, BY_NAME["token_weights"]),
    "ddp, more": (BY_NAME["shard_optimizer"], BY_NAME["fp16_overflow"]),
    "fsdp": (NORMALISED, BY_NAME["plain"]),
}


def mean_loss(case: Case, logits: Tensor, labels: Tensor, tokens: Tensor) -> Tensor:
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return cases.mean_loss(case, precise, labels, tokens)


def differences(backend: str, chosen: list[Case]) -> list[str]:
    """Train cases of `verify` on the CPU and on the device, and return what is not the same."""
    setattr(trial, "mean_loss", mean_loss)  # noqa: B010  (mypy: it is imported there)
    found = []
    for case in chosen:
        init = partial(unitrain.init, backend=backend)
        cpu, device = (trial.train(case, partial(init, device=name)) for name in ("cpu", "sim"))
        for name, expected in vars(cpu).items():
            try:
                torch.testing.assert_close(getattr(device, name), expected, rtol=0, atol=0)
            except AssertionError as error:
                found.append(f"{case.name}, {name}: {error}")
    return found


@pytest.mark.parametrize(
    "chosen",
    [
        "ddp",
        pytest.param("ddp, more", marks=pytest.mark.all("more cases")),
        pytest.param("fsdp", marks=pytest.mark.soak),
    ],
)
def test_digits(chosen: str) -> None:
    assert run(differences, chosen.partition(",")[0], CHOSEN[chosen], nprocs=2) == [[], []]


@pytest.mark.soak
@pytest.mark.parametrize("progress", ["late", "random", "at-once"])
@pytest.mark.parametrize(("backend", "nprocs"), [("single", 1), ("ddp", 1), ("ddp", 3), ("fsdp", 2)])
def test_digits_of_every_case(backend: str, nprocs: int, progress: str) -> None:
    found = run(
        differences, backend, [*CASES, NORMALISED], nprocs=nprocs, timeout=280, devices=nprocs, progress=progress
    )
    assert found == [[]] * nprocs


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(40, 3, 8, 8, generator=generator), torch.arange(40) % 10)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
    )  # fmt: skip


def loop(folder: Path, device: str, interrupted: bool = False, **settings: Any) -> list[Tensor]:
    """Train with all that a script has, and return numbers of all parts; optionally up to a checkpoint in an epoch.

    Its worker is forked: a new one in each rank imports torch for as long as all the rest takes.
    """
    common = {"backend": "ddp", "device": device, "sync_batchnorm": True, "accumulate": 2}
    with unitrain.init(**{**common, "clip_norm": 0.5, "on_nonfinite": "skip", **settings}) as strategy:
        net = network()
        model, optimizer = strategy.prepare(net, torch.optim.Adam(net.parameters(), fused=True))
        average = strategy.add(EMA(model, decay=0.5))
        train = strategy.dataloader(
            rows(), global_batch_size=8, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
        )
        test = strategy.dataloader(rows(), global_batch_size=16, shuffle=False)
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, average=average, train=train)
        throughput, losses = strategy.add(Throughput()), strategy.meter()
        checkpoint.resume()
        for _ in train.epochs(2):
            for images, labels in train:
                loss = cross_entropy(model(images), labels)
                if strategy.global_step == 2:
                    loss = loss * torch.inf
                result = strategy.step(loss, optimizer)
                losses.add(mean=loss.detach().nan_to_num(posinf=0.0), count=len(labels))
                if strategy.global_step == 4 and result.stepped and interrupted:
                    checkpoint.save()
                    return []
        right = strategy.meter()
        with strategy.evaluation(average):
            for images, labels in test:
                right.add(total=(model(images).argmax(1) == labels).sum(), count=len(labels))
        assert throughput.read() is not None
        every = [*model.state_dict().values(), *average.state_dict().values()]
        weights = torch.cat([value.reshape(-1).float().cpu() for value in every if isinstance(value, Tensor)])
        return [weights, torch.tensor(losses.value()), torch.tensor(right.value())]


class Model:
    """Garbage that, like a tensor of a GPU, must not be freed in another process."""

    def __init__(self) -> None:
        self.itself = self
        self.process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os.abort()


class Collecting(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        gc.collect()
        return torch.ones(2)


def after_a_fold() -> None:
    gc.disable()
    Model()
    with unitrain.init(device="sim") as strategy:
        assert (
            len(
                list(
                    strategy.dataloader(
                        Collecting(), global_batch_size=2, num_workers=1, multiprocessing_context="fork"
                    )
                )
            )
            == 2
        )
    gc.enable()


def test_workers_leave_the_garbage_of_their_parent_alone() -> None:
    run(after_a_fold, fresh=True)


def trained_and_resumed(folder: Path) -> None:
    weights, _, accuracy = loop(folder / "cpu", "cpu")
    loop(folder / "device", "sim", interrupted=True)
    again, _, reached = loop(folder / "device", "sim")
    torch.testing.assert_close((again, reached), (weights, accuracy), rtol=0, atol=0)


def test_a_script_and_its_continuation(tmp_path: Path) -> None:
    run(trained_and_resumed, tmp_path, nprocs=2, timeout=200)


def found_size() -> int:
    with unitrain.init(backend="single", device="sim:0") as strategy:

        def attempt(size: int) -> None:
            net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(strategy.device)
            optimizer = torch.optim.Adam(net.parameters())
            for _ in range(2):
                outputs = net(torch.randn(size, 64, device=strategy.device))
                cross_entropy(outputs, torch.arange(size, device=strategy.device) % 10).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

        sim.set_memory_limit(sim.memory_allocated() + 600_000)
        before = sim.memory_allocated()
        size = find_micro_batch_size(strategy, attempt, 128)
        assert sim.memory_allocated() == before
        return size


def test_the_batch_finder_runs_out_of_the_devices_memory() -> None:
    [size] = run(found_size, fresh=True)
    assert 8 <= size <= 64


def trained_with_a_weight_of_zero() -> list[list[Tensor]]:
    """Return the weights after a window with a batch without tokens, whose loss is NaN, and after one without it."""
    ends = []
    for losses in (2, 1):
        with unitrain.init(backend="single", device="sim:0", accumulate=losses, on_nonfinite="raise") as strategy:
            torch.manual_seed(0)
            net = nn.Linear(4, 2)
            model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            rows = torch.ones(3, 4, device=strategy.device)
            for tokens in (torch.tensor([3.0, 2.0]), torch.zeros(2))[:losses]:
                counts = tokens.to(strategy.device)
                masked = (model(rows).square().mean(0) * counts).sum() / counts.sum()
                strategy.step(masked, optimizer, weight=counts.sum())
            ends.append([parameter.detach().cpu() for parameter in net.parameters()])
    return ends


def test_a_weight_of_zero_that_only_the_device_knows_leaves_the_batch_out() -> None:
    [(with_it, without)] = run(trained_with_a_weight_of_zero)
    torch.testing.assert_close(with_it, without, rtol=0, atol=0)


def sent() -> tuple[str, list[float]]:
    with unitrain.init(backend="ddp", device="sim") as strategy:
        ours = {strategy.device: torch.ones(2, device=strategy.device)} if strategy.is_main else {}
        (received,) = strategy.communicator.broadcast_object(ours).values()
        return received.device.type, received.tolist()


def test_tensors_in_objects_arrive_on_the_host_and_not_on_the_device_of_the_sender() -> None:
    assert run(sent, nprocs=2)[1] == ("cpu", [1.0, 1.0])
