"""The micro-batch that is found fits on every rank, and everything is as before it was looked for."""

from __future__ import annotations

import copy
import errno
import mmap
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from needs import GPU, HOROVOD
from plain_loop import data, model_of, sgd, strategy_of, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch._utils import ExceptionWrapper
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset

import unitrain
from unitrain import DataError, UsageError, rng
from unitrain.features.ema import EMA
from unitrain.training.sizing.batch_finder import is_out_of_memory, reason

MB = 2**20
WIDTH = 2**17  # 1 MiB for each sample and layer


def out_of_memory() -> None:
    """Run out of memory as torch does on a host."""
    torch.empty(2**60)


def coupled(backend: str, most: list[int], normed: bool, shard_optimizer: bool = False) -> list[Any]:
    """Find a size when ranks run out of memory in the middle of their forward, and train with it."""
    with unitrain.init(
        backend=backend, device="cpu", precision="fp64", timeout_s=20, sync_batchnorm=True, debug=True,
        shard_optimizer=shard_optimizer,
    ) as strategy:  # fmt: skip
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if normed else nn.Tanh(), nn.Tanh(), nn.Linear(8, 2))
        model, optimizer = strategy.prepare(net, torch.optim.Adam(net.parameters()))
        train = strategy.dataloader(data(), global_batch_size=20)
        sizes = []

        def loss(batch: Any) -> Tensor:
            inputs, targets = batch
            sizes.append(len(inputs))
            outputs = model(inputs)
            if len(inputs) > most[strategy.rank]:
                out_of_memory()
            return mse_loss(outputs, targets)

        found = strategy.find_micro_batch_size(train, loss, optimizer)
        tried = list(dict.fromkeys(sizes))
        for batch in train:
            strategy.step(loss(batch), optimizer)
        strategy.check_in_sync(model)
        return [found, tried, len(train), strategy.global_step, weights(strategy.unwrap(model)).tolist()]


@pytest.mark.parametrize(
    ("backend", "launcher"), [("ddp", "spawn"), pytest.param("horovod", "horovodrun", marks=HOROVOD)]
)
def test_the_rank_with_the_least_memory_decides_and_leaves_no_other_waiting(
    backend: str, launcher: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run_ranks(coupled, backend, [10, 4], True, launcher=launcher)
    assert first == second
    assert first[:4] == [3, [10, 5, 3], 5, 2]  # 22 samples: a step of 20 in four parts, and one of 2
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unitrain: micro_batch_size")]
    assert re.fullmatch(
        r"unitrain: micro_batch_size 3, accumulate 4, for a global batch of 20: 5 samples did not fit on rank 1 \("
        r"DefaultCPUAllocator: can't allocate memory.*\)\.",
        line,
    )


def test_the_training_is_the_same_as_without_it() -> None:
    [(found, *_, of_one)] = run_ranks(coupled, "single", [20], False, nprocs=1)
    for sharded in (False, True):
        (_, _, parts, steps, of_two), _ = run_ranks(coupled, "ddp", [4, 4], False, sharded)
        assert (found, parts, steps) == (20, 5, 2)
        torch.testing.assert_close(torch.tensor(of_two), torch.tensor(of_one), rtol=0, atol=1e-5)


def refused() -> str:
    with unitrain.init(backend="ddp", device="cpu", precision="fp64", timeout_s=20) as strategy:
        net = model_of()
        model, optimizer = strategy.prepare(net, sgd(net))
        train = strategy.dataloader(data(), global_batch_size=8)

        def loss(batch: Any) -> Tensor:
            if strategy.rank == 1:
                out_of_memory()
            return mse_loss(model(batch[0]), batch[1])

        def gathers(batch: Any) -> Tensor:
            return mse_loss(strategy.gather(model(batch[0]), differentiable=True), strategy.gather(batch[1]))

        before = weights(net)
        with pytest.raises(UsageError, match="all_gather was called in a trial of find_micro_batch_size, which each"):
            strategy.find_micro_batch_size(train, gathers, optimizer)
        with pytest.raises(DataError) as raised:
            strategy.find_micro_batch_size(train, loss, optimizer)
        assert torch.equal(weights(net), before)
        assert strategy.gather([strategy.rank]) == [0, 1]
        return str(raised.value)


def test_one_sample_that_does_not_fit_is_an_error_on_every_rank() -> None:
    first, second = run_ranks(refused)
    assert first == second
    assert re.match(r"a micro-batch of 1 sample does not fit into memory: rank 1 \(.*\)\. Use activation_ch", first)


class Hungry(torch.optim.SGD):
    """Runs out of memory in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        out_of_memory()


def test_an_optimizer_that_does_not_fit_is_reported_as_well() -> None:
    with strategy_of() as strategy:
        net = model_of()
        model, optimizer = strategy.prepare(net, Hungry(net.parameters(), 0.1))
        train = strategy.dataloader(data(), global_batch_size=4)
        before = weights(net)
        with pytest.raises(DataError, match="a micro-batch of 1 sample does not fit"):
            strategy.find_micro_batch_size(train, lambda batch: mse_loss(model(batch[0]), batch[1]), optimizer)
        assert torch.equal(weights(net), before)


# ------------------------------------------------------------------------------------------------ what stays the same


class Everything:
    """A training with all kinds of state, some steps into an epoch."""

    def __init__(self, folder: Path) -> None:
        self.strategy = strategy_of(seed=3)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.scheduler = self.strategy.prepare(net, optimizer, scheduler)
        self.ema = self.strategy.add(EMA(self.model, 0.5))
        self.train = self.strategy.dataloader(data(), global_batch_size=6, shuffle=True)

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.model(batch[0]), batch[1])

    def steps(self, most: int) -> None:
        for batch in islice(self.train, most):
            self.strategy.step(self.loss(batch), self.optimizer, self.scheduler)

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "attributes": dict.fromkeys(vars(self.optimizer), 0),
            "ema": self.ema.state_dict(),
            "train": self.train.state_dict(),
            "steps": self.strategy.global_step,
            "random": rng.capture(),
        })  # fmt: skip


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert flat(one).keys() == flat(other).keys()
    for path, value in flat(one).items():
        there = flat(other)[path]
        assert torch.equal(value, there) if isinstance(value, Tensor) else value == there, path


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the tensors and plain values in nested dicts and lists, by their paths."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {path: value}
    return {k: v for key, inner in items for k, v in flat(inner, f"{path}/{key}").items()}


def test_everything_is_as_before(tmp_path: Path) -> None:
    ends = []
    for finds in (False, True):
        run = Everything(tmp_path)
        for steps in (0, 2, 1):
            run.steps(steps)
            if finds:
                before = run.state()
                assert run.strategy.find_micro_batch_size(run.train, run.loss, run.optimizer) == 6
                assert_same(run.state(), before)
                assert all(p.grad is None for p in run.model.parameters())
        run.steps(4)
        ends.append(run.state())
        run.strategy.close()
    assert_same(ends[1], ends[0])


def test_a_compiled_model_is_compiled_for_the_size_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # torch's tracer has progress bars, whose thread would stay
    symbolic = []

    def note(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        symbolic.append(any(isinstance(one, torch.SymInt) for one in inputs))
        return module.forward

    with strategy_of() as strategy:
        net = model_of()
        net.compile(backend=note)
        model, optimizer = strategy.prepare(net, sgd(net))
        train = strategy.dataloader(data(), global_batch_size=11)

        def loss(batch: Any) -> Tensor:
            if len(batch[0]) > 3:
                model(batch[0])
                out_of_memory()
            return mse_loss(model(batch[0]), batch[1])

        assert strategy.find_micro_batch_size(train, loss, optimizer) == 3
        assert True in symbolic
        symbolic.clear()
        for inputs, targets in islice(train, 1):
            strategy.step(mse_loss(model(inputs), targets), optimizer)
        assert symbolic == [False]
    torch.compiler.reset()


@pytest.mark.gpu
@GPU
def test_a_gpu() -> None:
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    try:
        with unitrain.init(backend="single", device="cuda") as strategy:
            net = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
            model, optimizer = strategy.prepare(net, torch.optim.Adam(net.parameters()))
            train = strategy.dataloader(data().tensors[0].float(), global_batch_size=22)

            def loss(batch: Any) -> Tensor:
                torch.empty(len(batch) * 100 * MB, dtype=torch.uint8, device="cuda")
                result: Tensor = model(batch).square().mean()
                return result

            assert strategy.find_micro_batch_size(train, loss, optimizer) == 11
            for batch in train:
                strategy.step(loss(batch), optimizer)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_an_error_of_the_loss_is_raised_and_nothing_has_changed(tmp_path: Path) -> None:
    run = Everything(tmp_path)
    before = run.state()

    def fails_later(batch: Any) -> Tensor:
        loss = run.loss(batch)
        if len(batch[0]) > 3:
            raise RuntimeError("shapes differ")
        return loss

    with pytest.raises(RuntimeError, match="shapes differ"):
        run.strategy.find_micro_batch_size(run.train, fails_later, run.optimizer)
    assert_same(run.state(), before)
    run.strategy.close()


# ------------------------------------------------------------------------------------------------- what is refused


def test_what_can_not_be_found_is_refused() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.ones(8, 4, dtype=torch.float64))

    with strategy_of() as strategy:
        net = model_of()
        model, optimizer = strategy.prepare(net, sgd(net))
        train = strategy.dataloader(data(), batch_size=4)

        def loss(batch: Any) -> Tensor:
            return mse_loss(model(batch[0]), batch[1])

        find: Any = strategy.find_micro_batch_size
        for arguments, said in [
            (([1], loss, optimizer), "takes a loader made by strategy.dataloader, not list"),
            ((train, loss, net), "takes a torch optimizer, or a non-empty list of them"),
            ((train, loss, []), "takes a torch optimizer, or a non-empty list of them"),
            ((train, lambda batch: model(batch[0]), optimizer), r"must be a scalar, but has shape \(4, 2\)"),
            ((train, lambda batch: loss(batch).item(), optimizer), "a loss is a tensor, not float"),
            ((strategy.dataloader(Stream(), batch_size=4), loss, optimizer), "of an iterable dataset can't be changed"),
            ((strategy.dataloader(data(), batch_sampler=[[0, 1]]), loss, optimizer), "with a batch sampler can't be"),
        ]:
            with pytest.raises(UsageError, match=said):
                find(*arguments)
        assert find(train, loss, [optimizer]) == 4
        strategy.backward(loss(next(iter(train))))
        with pytest.raises(UsageError, match="gradients have been accumulated"):
            find(train, loss, optimizer)
    with strategy_of(accumulate=2) as strategy:
        net = model_of()
        model, optimizer = strategy.prepare(net, sgd(net))
        train = strategy.dataloader(data(), global_batch_size=4)
        with pytest.raises(UsageError, match="accumulate is 2, and find_micro_batch_size would choose it"):
            strategy.find_micro_batch_size(train, loss, optimizer)
    with strategy_of(shares=(1,)) as strategy:
        net = model_of()
        model, optimizer = strategy.prepare(net, sgd(net))
        train = strategy.dataloader(data(), global_batch_size=4)
        with pytest.raises(UsageError, match="does not support unequal shares"):
            strategy.find_micro_batch_size(train, loss, optimizer)


# ------------------------------------------------------------------------------------- which errors mean no memory

HUGE = 2**58  # bytes; no process can map so much


def worker() -> None:
    """Fail as a DataLoader does when one of its workers has failed."""
    try:
        torch.empty(HUGE, dtype=torch.uint8)
    except RuntimeError:
        error = ExceptionWrapper(where="in DataLoader worker process 0")  # type: ignore[no-untyped-call]
    error.reraise()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "fails",
    [
        lambda: torch.empty(HUGE, dtype=torch.uint8),
        lambda: bytearray(HUGE),
        lambda: np.empty(HUGE, dtype=np.uint8),
        lambda: mmap.mmap(-1, HUGE),
        worker,
    ],
    ids=["torch", "python", "numpy", "mmap", "worker"],
)
def test_what_a_host_says(fails: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError, OSError)) as raised:
        fails()
    assert is_out_of_memory(raised.value)


# Without a GPU here: as they are reported.
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("FIND was unable to find an engine to execute this computation"),
        RuntimeError("std::bad_alloc"),
    ],
    ids=str,
)
def test_what_gpus_and_libraries_say(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("out of memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyError("x"),
    ],
    ids=str,
)
def test_other_errors(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_the_reason_is_one_line_without_torch_s_source() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(HUGE, dtype=torch.uint8)
    assert re.match(rf"DefaultCPUAllocator: can't allocate memory: .* {HUGE} bytes", reason(raised.value))
    assert reason(MemoryError()) == "MemoryError"
    assert reason(RuntimeError("CUDA error: out of memory\nmore")) == "CUDA error: out of memory"
