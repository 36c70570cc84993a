"""The micro-batch that is found fits in a whole training, a larger one does not, and the training is the same."""

from __future__ import annotations

import copy
import ctypes
import re
import resource
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from needs import GPU, HOROVOD
from plain_loop import data, model_of, sgd, strategy_of, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset, TensorDataset

import unitrain
from unitrain import DataError, Strategy, UsageError, rng
from unitrain.data.order.sharding import EpochPlan
from unitrain.training.sizing.batch_finder import micro_batch_sizes, search
from unitrain.training.sizing.out_of_memory import is_out_of_memory

MB = 2**20
M_ARENA_MAX = -8  # of glibc's malloc.h
BATCH, EPOCHS = 32, 2
WIDTH = 2**17  # 1 MiB for each sample and layer


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = self.first(x).relu().square() * self.scale
        return wide.mean(1)


def samples(count: int = BATCH) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 2, generator=generator), torch.randn(count, generator=generator).double())


class Run:
    """A training with Adam and an average of the weights."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        net = Wide()
        self.model, self.optimizer = strategy.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-3))
        self.ema = strategy.ema(self.model)
        self.train = self.loader()

    def loader(self, micro_batch_size: int | None = None) -> unitrain.Loader:
        return self.strategy.dataloader(
            samples(), global_batch_size=BATCH, micro_batch_size=micro_batch_size, shuffle=True
        )

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return mse_loss(self.model(inputs), targets)

    def epochs(self) -> Tensor:
        for _ in self.train.epochs(EPOCHS):
            for batch in self.train:
                self.strategy.step(self.loss(batch), self.optimizer)
        self.strategy.check_in_sync(self.model)
        return weights(self.strategy.unwrap(self.model))


def limit(megabytes: int) -> None:
    """Let the address space of this process grow by so much, and no more."""
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * MB, -1))


def limited(backend: str, megabytes: Sequence[int]) -> dict[str, Any]:
    """Find a size with so much memory on each rank, and train with it; then with larger ones, if alone."""
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # one of a thread would reserve 64 MiB
    with unitrain.init(backend=backend, device="cpu", precision="fp64", timeout_s=60) as strategy:
        run = Run(strategy)
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]  # loads what it needs
        limit(megabytes[strategy.rank])
        found = strategy.find_micro_batch_size(run.train, run.loss, run.optimizer)
        outcome: dict[str, Any] = {"size": found, "parts": len(run.train), "weights": run.epochs()}
        larger = [size for size in micro_batch_sizes(BATCH, 1) if size > found]
        for size in larger if strategy.world_size == 1 else ():
            run.train = run.loader(size)
            try:
                run.epochs()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                outcome["fails"] = size
                break
        return outcome


@pytest.fixture(scope="module")
def unlimited() -> Tensor:
    with unitrain.init(backend="single", device="cpu", precision="fp64") as strategy:
        return Run(strategy).epochs()


def assert_found(outcome: dict[str, Any], world_size: int, unlimited: Tensor) -> None:
    assert 1 < outcome["size"] < BATCH // world_size
    assert outcome["parts"] == -(-BATCH // (outcome["size"] * world_size))
    torch.testing.assert_close(outcome["weights"], unlimited, rtol=0, atol=1e-9)


def test_a_training_fits_at_the_size_found_and_not_at_a_larger_one(unlimited: Tensor) -> None:
    [outcome] = run_ranks(limited, "single", [70], nprocs=1, fresh=True)
    assert_found(outcome, 1, unlimited)
    assert outcome["fails"] <= 2 * outcome["size"]


@pytest.mark.parametrize(
    ("backend", "launcher"), [("ddp", "spawn"), pytest.param("horovod", "horovodrun", marks=HOROVOD)]
)
def test_the_rank_with_the_least_memory_decides(
    backend: str, launcher: Any, unlimited: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = run_ranks(limited, backend, [300, 55], launcher=launcher, fresh=True)
    for outcome in outcomes:
        assert_found(outcome, 2, unlimited)
    assert len({outcome["size"] for outcome in outcomes}) == 1
    size, parts = outcomes[0]["size"], outcomes[0]["parts"]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unitrain: micro_batch_size")]
    assert len(said) == 1
    assert re.fullmatch(
        rf"unitrain: micro_batch_size {size}, accumulate {parts}, for a global batch of {BATCH}: \d+ samples did not "
        r"fit on rank 1 \(.*(memory|bad_alloc).*\)\.",
        said[0],
    )


def refused() -> str:
    """Find a size for samples of 500 MB on ranks of which one has 300."""
    with unitrain.init(backend="ddp", device="cpu", precision="fp64", timeout_s=20) as strategy:
        net = model_of()
        model, optimizer = strategy.prepare(net, sgd(net))
        train = strategy.dataloader(data(), global_batch_size=8)

        def loss(batch: Any) -> Tensor:
            torch.empty(len(batch[0]) * 500 * MB, dtype=torch.uint8)
            return mse_loss(model(batch[0]), batch[1])

        if strategy.rank == 1:
            limit(300)
        before = weights(net)
        with pytest.raises(DataError) as raised:
            strategy.find_micro_batch_size(train, loss, optimizer)
        assert torch.equal(weights(net), before)
        return str(raised.value)


def test_one_sample_that_does_not_fit_is_an_error_on_every_rank() -> None:
    first, second = run_ranks(refused)
    assert first == second
    assert re.match(r"a micro-batch of 1 sample does not fit into memory: rank 1 \(.*\)\. Use activation_ch", first)


def test_without_a_limit_no_more_is_taken_than_the_host_has() -> None:
    """The blocks are never written to, so that the kernel would give many more of them."""
    with strategy_of(device="cpu") as strategy:
        net = model_of()
        model, optimizer = strategy.prepare(net, sgd(net))
        train = strategy.dataloader(data(), global_batch_size=16)
        block = psutil.virtual_memory().available // 50

        def loss(batch: Any) -> Tensor:
            blocks = [torch.empty(block, dtype=torch.uint8) for _ in range(5 * len(batch[0]))]
            return mse_loss(model(batch[0]), batch[1]) + 0 * len(blocks)

        assert 4 <= strategy.find_micro_batch_size(train, loss, optimizer) <= 8


def coupled(backend: str) -> list[Any]:
    """Find a size for a loss that communicates, when rank 1 runs out of memory in the middle of its collectives."""
    with unitrain.init(
        backend=backend, device="cpu", precision="fp64", timeout_s=20, sync_batchnorm=True, debug=True
    ) as strategy:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        model, optimizer = strategy.prepare(net, sgd(net))
        train = strategy.dataloader(data(), global_batch_size=20)
        sizes = []

        def loss(batch: Any) -> Tensor:
            inputs, targets = batch
            sizes.append(len(inputs))
            outputs = strategy.gather(model(inputs), differentiable=True)
            if strategy.rank == 1 and len(inputs) > 3:
                torch.empty(2**60)
            return mse_loss(outputs, strategy.gather(targets)) + 0 * strategy.all_reduce(outputs.sum().detach())

        found = strategy.find_micro_batch_size(train, loss, optimizer)
        tried = list(dict.fromkeys(sizes))
        for batch in train:
            strategy.step(loss(batch), optimizer)
        strategy.check_in_sync(model)
        return [found, tried, len(train), strategy.global_step, weights(strategy.unwrap(model)).tolist()]


@pytest.mark.parametrize(
    ("backend", "launcher"), [("ddp", "spawn"), pytest.param("horovod", "horovodrun", marks=HOROVOD)]
)
def test_a_rank_without_memory_leaves_no_other_waiting(backend: str, launcher: Any) -> None:
    first, second = run_ranks(coupled, backend, launcher=launcher)
    assert first == second
    assert first[:4] == [3, [2, 4, 3], 5, 2]  # 22 samples: a step of 20 in four parts, and one of 2


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
        self.ema = self.strategy.ema(self.model, 0.5)
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
        strategy.find_micro_batch_size(train, lambda batch: mse_loss(model(batch[0]), batch[1]), optimizer)
        assert True in symbolic
        symbolic.clear()
        for inputs, targets in train:
            strategy.step(mse_loss(model(inputs), targets), optimizer)
        assert symbolic == [False]
    torch.compiler.reset()


@pytest.mark.gpu
@GPU
def test_a_gpu() -> None:
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    try:
        with unitrain.init(backend="single", device="cuda", precision="fp64") as strategy:
            run = Run(strategy)
            block = 2**26

            def loss(batch: Any) -> Tensor:
                torch.empty(len(batch[0]) * block, dtype=torch.uint8, device="cuda")
                return run.loss(batch)

            assert 8 <= strategy.find_micro_batch_size(run.train, loss, run.optimizer) < BATCH
            for batch in run.train:
                strategy.step(loss(batch), run.optimizer)
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


# ------------------------------------------------------------------------------------------------------- the search


@pytest.mark.parametrize(("global_batch", "world_size"), [(1, 1), (1, 4), (7, 2), (24, 1), (24, 5), (256, 8), (100, 3)])
def test_sizes_are_those_of_the_micro_batches(global_batch: int, world_size: int) -> None:
    sizes = micro_batch_sizes(global_batch, world_size)
    for size in sizes:
        parts = -(-global_batch // (size * world_size))
        plan = EpochPlan(global_batch, global_batch, parts, 0, world_size, False)
        assert max(micro_batch.count for micro_batch in plan) == size
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == -(-global_batch // world_size)


@pytest.mark.parametrize("global_batch", [1, 2, 3, 24, 100, 257])
def test_the_search_finds_the_largest_and_rises_slowly(global_batch: int) -> None:
    sizes = micro_batch_sizes(global_batch, 1)
    for limit in range(global_batch + 2):
        tried: list[int] = []

        def fits(size: int, limit: int = limit, tried: list[int] = tried) -> bool:
            tried.append(size)
            return size <= limit

        found = search(sizes, fits)
        assert [size for size in sizes if size <= limit] == sizes[: found + 1]
        assert len(tried) == len(set(tried)) <= 12
        fitting = [0, *(size for size in tried if size <= limit)]
        assert all(size <= 3 * max(fitting[:n], default=0) or size <= 2 for n, size in enumerate(fitting) if n)


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
            ((train, 3, optimizer), "takes a function that returns the loss of a batch, not int"),
            ((train, loss, net), "takes a torch optimizer, or a non-empty list of them"),
            ((train, loss, []), "takes a torch optimizer, or a non-empty list of them"),
            ((train, lambda batch: model(batch[0]), optimizer), r"must be a scalar, but has shape \(2, 2\)"),
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
