"""What every backend owes its users, as functions that ranks run. ``test_conformance.py`` runs them in every world.

Each function asserts on its own rank, and each starts and closes strategies as a script would.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import unitrain
from unitrain import CheckpointError, CommunicationError, NonFiniteError, Stopped, Strategy, UsageError
from unitrain.training.gradients import GradientReducer

EXACT = 1e-12


@dataclass(frozen=True)
class World:
    """A backend on so many processes."""

    backend: str
    processes: int
    launcher: Literal["spawn", "horovodrun"] = "spawn"
    path: str | None = None
    """Where the backend's distribution is installed, if not where everything is."""

    def run(self, duty: Callable[..., Any], *args: Any, timeout: float = 90) -> list[Any]:
        """Run ``duty(self, *args)`` as every rank of this world: where it is alone, in this process."""
        if self.processes == 1:
            return [duty(self, *args)]
        return run_ranks(duty, self, *args, nprocs=self.processes, launcher=self.launcher, timeout=timeout)

    def open(self, **settings: Any) -> Strategy:
        """Start a strategy, on a rank."""
        if self.path is not None and self.path not in sys.path:
            sys.path.insert(0, self.path)
        return unitrain.init(
            **{"backend": self.backend, "precision": "fp64", "device": "cpu", "timeout_s": 30, **settings}
        )


def in_turn(world: World, duties: Sequence[Callable[[World], None]]) -> None:
    """Do one duty after another; what was printed says which one failed."""
    for duty in duties:
        print(duty.__name__)
        duty(world)


# ------------------------------------------------------------------------------------------------------ collectives

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
)  # fmt: skip


def _samples(dtype: torch.dtype, rank: int) -> Iterator[Tensor]:
    """Yield what rank ``rank`` contributes: matrices, scalars, empty and non-contiguous tensors."""
    base = (torch.arange(6).reshape(2, 3) * (rank + 1) + rank) % 7
    if dtype == torch.bool:
        base = base % 3 == 0
    yield base.to(dtype)
    yield base.to(dtype)[1, 2]
    yield base.to(dtype)[:0]
    yield base.to(dtype).t()
    yield base.to(dtype)[:, ::2]
    yield base.to(dtype).reshape(1, 2, 1, 3)


def _reduced(op: str, stacked: Tensor) -> Tensor:
    if stacked.dtype == torch.bool:
        return stacked.sum(0) if op == "sum" else stacked.any(0) if op == "max" else stacked.all(0)
    if op in ("sum", "mean"):
        total = stacked.to(torch.float64).sum(0)
        return (total / len(stacked) if op == "mean" else total).to(stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def reductions(world: World) -> None:
    with world.open() as strategy:
        for dtype in DTYPES:
            per_rank = [list(_samples(dtype, rank)) for rank in range(strategy.world_size)]
            for case, op in itertools.product(range(len(per_rank[0])), ("sum", "mean", "max", "min")):
                if op == "mean" and not dtype.is_floating_point:
                    continue
                mine = per_rank[strategy.rank][case]
                before = mine.clone()
                result = strategy.all_reduce(mine, op)  # type: ignore[arg-type]
                expected = _reduced(op, torch.stack([samples[case] for samples in per_rank]))
                where = f"{op} of {dtype}, case {case}"
                assert (result.dtype, result.shape) == (expected.dtype, expected.shape), where
                assert torch.equal(result, expected), where
                assert torch.equal(mine, before), where
                assert result.data_ptr() != mine.data_ptr() or not mine.numel(), where


def gathers_and_broadcasts(world: World) -> None:
    with world.open() as strategy:
        for dtype in DTYPES:
            per_rank = [list(_samples(dtype, rank)) for rank in range(strategy.world_size)]
            for case, mine in enumerate(per_rank[strategy.rank]):
                expected = torch.stack([samples[case] for samples in per_rank])
                gathered = strategy.all_gather(mine)
                torch.testing.assert_close(gathered, expected, rtol=0, atol=0)
                for src in range(strategy.world_size):
                    received = strategy.broadcast(mine, src)
                    torch.testing.assert_close(received, expected[src], rtol=0, atol=0)
                assert torch.equal(mine, list(_samples(dtype, strategy.rank))[case])


def refused_reductions(world: World) -> None:
    with world.open() as strategy:
        whole = torch.ones(1, dtype=torch.int32)
        verbs: Any = strategy  # what mypy would catch, too
        for verb, arguments, message in [
            ("all_reduce", (torch.ones(1), "avg"), "sum, mean, max and min, not 'avg'"),
            ("all_reduce", (whole, "mean"), "convert it to a floating-point"),
            ("all_reduce", (torch.ones(1, dtype=torch.cfloat),), "view_as_real"),
            ("all_gather", (torch.eye(2).to_sparse(),), "to_dense"),
            ("all_reduce", (1.0,), r"torch\.tensor"),
            ("broadcast", (whole, strategy.world_size), "there is no rank"),
            ("broadcast_object", (1, -1), "there is no rank -1"),
        ]:
            with pytest.raises(UsageError, match=message):
                getattr(verbs, verb)(*arguments)
        assert float(strategy.all_reduce(torch.ones(()))) == strategy.world_size  # and all goes on


def objects(world: World) -> None:
    with world.open() as strategy:
        rank, size = strategy.rank, strategy.world_size
        for src in range(size):
            value = {"from": rank, "none": None, "long": "x" * 100_000 * (rank + 1)}
            assert strategy.broadcast_object(value, src) == {
                "from": src,
                "none": None,
                "long": "x" * 100_000 * (src + 1),
            }
        assert strategy.broadcast_object(None) is None
        assert strategy.all_gather_object(["r"] * rank) == [["r"] * other for other in range(size)]
        strategy.barrier()
        assert (strategy.world_size, strategy.is_main) == (world.processes, rank == 0)
        assert strategy.all_reduce(torch.tensor(rank)).item() == sum(range(size))


def meters(world: World) -> None:
    with world.open() as strategy:
        meter = strategy.meter()
        assert math.isnan(meter.value())
        for count in range(strategy.rank + 1):  # counts 0 to rank: uneven, and the first one is empty
            meter.add(total=torch.tensor(math.nan if count == 0 else 2.0 * count), count=count)
        counts = [sum(range(rank + 1)) for rank in range(strategy.world_size)]
        assert meter.count() == sum(counts)
        assert meter.sum() == 2 * sum(counts)
        assert meter.value() == 2.0 if strategy.world_size > 1 else math.isnan(meter.value())
        meter.reset()
        meter.add(total=1.5, count=3)
        assert meter.value() == 0.5


# ------------------------------------------------------------------------------------------------------- rank-0 I/O


def rank_0_io(world: World, folder: Path) -> None:
    with world.open() as strategy:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            strategy.print("once", strategy.rank, sep="-")
        assert printed.getvalue() == ("once-0\n" if strategy.is_main else "")

        marker = folder / "marker"
        with strategy.main_first():
            assert marker.exists() != strategy.is_main
            if strategy.is_main:
                time.sleep(0.05)  # the others would be here by now
                marker.touch()

        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        prepared, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
        strategy.step(prepared(torch.ones(4, 3)).sum(), optimizer)
        norm = model[1]
        assert isinstance(norm, nn.BatchNorm1d)
        assert isinstance(norm.running_mean, Tensor)
        norm.running_mean.fill_(strategy.rank)
        path = folder / "deep" / "er" / "state.pt"
        strategy.save(
            {"model": prepared, "optimizer": optimizer, "list": [1, "two", None], "rank": strategy.rank}, path
        )
        assert [p.name for p in path.parent.iterdir()] == ["state.pt"]
        loaded = strategy.load(path)
        assert list(loaded["model"]) == list(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).state_dict())
        assert loaded["model"]["1.running_mean"].tolist() == [(strategy.world_size - 1) / 2] * 3
        assert torch.equal(loaded["model"]["0.weight"], strategy.broadcast(model.get_parameter("0.weight")))
        assert loaded["optimizer"]["state"][0]["momentum_buffer"].shape == (3, 3)
        assert (loaded["list"], loaded["rank"]) == ([1, "two", None], 0)
        with pytest.raises(CheckpointError, match="does not exist"):
            strategy.load(folder / "none.pt")
        with pytest.raises(CheckpointError, match="could not be written"):
            strategy.save({"a": 1}, marker / "below a file")
        with pytest.raises(CheckpointError, match="could not be written"):
            strategy.save({"code": lambda: None}, folder / "code.pt")
        if strategy.world_size > 1:
            with pytest.raises(UsageError, match="modules on some ranks only"):
                strategy.save(prepared if strategy.is_main else None, path)


# ---------------------------------------------------------------------------------------------------------- training

SAMPLES = 23  # uneven on 2 and on 3 ranks


def _data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randn(samples, 2, generator=generator, dtype=torch.float64))


def _two_rows_each(strategy: Strategy) -> tuple[Tensor, Tensor, slice]:
    """Return the inputs and targets of all ranks, two rows for each, and which of them are this rank's."""
    inputs, targets = _data(2 * strategy.world_size).tensors
    return inputs, targets, slice(2 * strategy.rank, 2 * strategy.rank + 2)


class Net(nn.Module):
    def __init__(self, seed: int = 0, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.last = nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


def _sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def _flat(model: nn.Module) -> Tensor:
    tensors = [t.detach().double().reshape(-1) for t in (*model.parameters(), *model.buffers())]
    return torch.cat(tensors)


def _assert_same(model: nn.Module, expected: nn.Module, atol: float = EXACT) -> None:
    torch.testing.assert_close(_flat(model), _flat(expected), rtol=0, atol=atol)


def _assert_bit_equal_on_all_ranks(strategy: Strategy, model: nn.Module) -> None:
    everyone = strategy.all_gather(_flat(model))
    assert all(torch.equal(one, everyone[0]) for one in everyone)


@dataclass(frozen=True)
class Mode:
    """One way to train, under the strategy and by hand."""

    name: str
    settings: dict[str, Any]
    norm: bool = False
    global_batch: int = 6  # 23 = 3 * 6 + 5
    weighted: bool = False

    def loss(self, out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss and what it is the mean over: rows, or tokens."""
        losses = (out - targets).pow(2).mean(1)
        tokens = 1 + (targets[:, 0] > 0) * 3 if self.weighted else torch.ones(len(targets))
        return (losses * tokens).sum() / tokens.sum(), tokens.sum()


MODES = (
    Mode("plain", {}),
    Mode("fewer samples than ranks", {}, global_batch=11),  # 23 = 2 * 11 + 1
    Mode("sync_batchnorm", {"sync_batchnorm": True}, norm=True),
    Mode("accumulate", {"accumulate": 3}),
    Mode("accumulate with empty micro-batches", {"accumulate": 4}, global_batch=5),
    Mode("clip_norm", {"clip_norm": 0.3}),
    Mode("clip_value", {"clip_value": 0.05}),
    Mode("token weights", {"accumulate": 2}, weighted=True),
    Mode("deterministic", {"deterministic": True, "sync_batchnorm": True}, norm=True),
    Mode("everything", {"accumulate": 2, "clip_norm": 0.3, "clip_value": 0.2, "on_nonfinite": "raise"}, weighted=True),
    Mode("debug", {"accumulate": 2, "debug": True}, weighted=True),
)
_EPOCHS = 2


def _by_hand(mode: Mode) -> tuple[nn.Module, list[float]]:
    model = Net(norm=mode.norm)
    optimizer = _sgd(model)
    scheduler = StepLR(optimizer, 2, gamma=0.7)
    inputs, targets = _data().tensors
    norms = []
    for _, start in itertools.product(range(_EPOCHS), range(0, SAMPLES, mode.global_batch)):
        rows = slice(start, start + mode.global_batch)
        optimizer.zero_grad()
        mode.loss(model(inputs[rows]), targets[rows])[0].backward()  # type: ignore[no-untyped-call]
        if "clip_value" in mode.settings:
            nn.utils.clip_grad_value_(model.parameters(), mode.settings["clip_value"])
        if "clip_norm" in mode.settings:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), mode.settings["clip_norm"])))
        optimizer.step()
        scheduler.step()
    return model, norms


def trains_as_one_device(world: World) -> None:
    for mode in MODES:
        print(mode.name)
        with world.open(**mode.settings) as strategy:
            _train(strategy, mode)


def _train(strategy: Strategy, mode: Mode) -> None:
    expected, expected_norms = _by_hand(mode)
    model = Net(seed=strategy.rank, norm=mode.norm)  # rank 0's weights are everybody's
    optimizer = _sgd(model)
    scheduler = StepLR(optimizer, 2, gamma=0.7)
    prepared, *_ = strategy.prepare(model, optimizer, scheduler)
    loader = strategy.dataloader(_data(), global_batch_size=mode.global_batch)
    norms = []
    for _ in loader.epochs(_EPOCHS):
        for inputs, targets in loader:
            loss, tokens = mode.loss(prepared(inputs), targets)
            result = strategy.step(loss, optimizer, scheduler, weight=tokens if mode.weighted else None)
            assert not result.skipped
            norms += [float(result.grad_norm)] if result.grad_norm is not None else []
    assert scheduler.last_epoch == _EPOCHS * loader.steps_per_epoch
    _assert_same(model, expected)
    assert norms == pytest.approx(expected_norms, rel=1e-12)
    _assert_bit_equal_on_all_ranks(strategy, model)
    strategy.check_in_sync(prepared)
    # what is evaluated and exported is the same, too
    with strategy.evaluation(prepared):
        inputs, _ = _data().tensors
        torch.testing.assert_close(prepared(inputs), expected.eval()(inputs), rtol=0, atol=EXACT)
    exported = strategy.export(prepared)
    assert type(exported) is Net
    _assert_same(exported, expected)


def options_of_ddp(world: World) -> None:
    for options in (
        {"static_graph": True},
        {"gradient_as_bucket_view": False},
        {"broadcast_buffers": True},
        {"bucket_cap_mb": 1e-4},
        {"find_unused_parameters": True},
    ):
        print(options)
        with world.open(ddp=options) as strategy:
            _train(strategy, Mode("plain", {}))


def precisions(world: World) -> None:
    """bf16 and fp16, the latter with an overflow on the last rank alone: ranks stay bit-equal, and learn."""
    for precision in ("fp32", "bf16", "fp16"):
        with world.open(precision=precision) as strategy:
            model = Net().float()
            prepared, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.05))
            losses, skipped = [], []
            for step in range(8):
                for inputs, targets in strategy.dataloader(_data(), global_batch_size=SAMPLES):
                    with strategy.autocast():
                        out = prepared(inputs.float())
                        assert (
                            out.dtype
                            == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
                        )
                        loss = mse_loss(out.float(), targets.float())
                    losses.append(loss.item())
                    overflows = precision == "fp16" and step == 3 and strategy.rank == strategy.world_size - 1
                    before = _flat(model)
                    result = strategy.step(loss * 1e36 if overflows else loss, optimizer)
                    assert result.stepped != torch.equal(_flat(model), before)
                    skipped.append(result.skipped)
            assert skipped == [precision == "fp16" and step == 3 for step in range(8)]
            assert losses[-1] < losses[0]
            assert all(p.dtype == torch.float32 for p in model.parameters())
            _assert_bit_equal_on_all_ranks(strategy, model)


# ----------------------------------------------------------------------------- models and optimizers of all kinds


class Branches(nn.Module):
    """Layers that take part, or don't, by the number that forward is given."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)
        self.never = nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        out: Tensor = (self.left if branch == 0 else self.right)(torch.tanh(self.norm(self.trunk(x))))
        return out


def unused_parameters(world: World) -> None:
    """What no rank used keeps grad None, so that weight decay and momentum pass it by; what one rank used counts."""
    settings = {"ddp": {"find_unused_parameters": True}} if world.backend == "ddp" else {}
    with world.open(**settings) as strategy:
        model, expected = Branches(), Branches()
        prepared, optimizer = strategy.prepare(model, AdamW(model.parameters(), lr=0.1, weight_decay=0.3))
        by_hand = AdamW(expected.parameters(), lr=0.1, weight_decay=0.3)
        inputs, targets = _data(6 * strategy.world_size).tensors
        share = slice(6 * strategy.rank, 6 * strategy.rank + 6)
        for step in range(4):
            # in even steps the last rank goes right and the others left; in odd ones all go left
            branch = [int(step % 2 == 0 and rank == strategy.world_size - 1) for rank in range(strategy.world_size)]
            strategy.step(mse_loss(prepared(inputs[share], branch[strategy.rank]), targets[share]), optimizer)
            by_hand.zero_grad()
            for rank, its in enumerate(branch):
                rows = slice(6 * rank, 6 * rank + 6)
                (mse_loss(expected(inputs[rows], its), targets[rows]) / strategy.world_size).backward()  # type: ignore[no-untyped-call]
            by_hand.step()
        _assert_same(model, expected)
        assert model.never.weight not in optimizer.state
        assert torch.equal(model.never.weight, Branches().never.weight)
        _assert_bit_equal_on_all_ranks(strategy, model)


class Turns(nn.Module):
    """A layer with complex weights, as Fourier operators have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.turn = nn.Linear(4, 2, dtype=torch.cdouble)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.turn(x.to(torch.cdouble)).abs()
        return out


def complex_weights(world: World) -> None:
    with world.open(clip_norm=0.5) as strategy:
        model, expected = Turns(), Turns()
        prepared, optimizer = strategy.prepare(model, _sgd(model))
        clipped = _sgd(expected)
        clipped.register_step_pre_hook(lambda *_: _clip(expected))
        _steps(strategy, prepared, optimizer, expected, clipped, 3)
        torch.testing.assert_close(model.turn.weight, expected.turn.weight, rtol=0, atol=EXACT)


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def sparse_gradients(world: World) -> None:
    """Summed where the engine can, as DDP's; elsewhere refused in so many words, on every rank."""
    with world.open() as strategy:
        model, expected = (nn.Embedding(5, 2, sparse=True, _weight=torch.ones(5, 2)).double() for _ in range(2))
        prepared, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
        by_hand = SGD(expected.parameters(), lr=0.1)
        try:
            strategy.step(prepared(torch.tensor([strategy.rank, 4])).pow(2).mean(), optimizer)
        except UsageError as error:
            refused = str(error)
        else:
            refused = ""
        assert ("make its layer with sparse=False" in refused) == (world.processes > 1 and world.backend != "ddp")
        if refused:
            return
        for rank in range(strategy.world_size):
            loss = expected(torch.tensor([rank, 4])).pow(2).mean() / strategy.world_size
            loss.backward()
        by_hand.step()
        _assert_same(model, expected)


def unused_parameters_beside_batch_norm(world: World) -> None:
    """Ranks that take different branches still agree on the order of gradients' and BatchNorm's collectives."""
    one_for_each_parameter = patch.dict(GradientReducer.__init__.__kwdefaults__ or {}, bucket_mb=1e-6)
    for settings in (
        {"ddp": {"find_unused_parameters": True}} if world.backend == "ddp" else {},
        {"deterministic": True},
    ):
        with one_for_each_parameter, world.open(sync_batchnorm=True, **settings) as strategy:
            model, expected = Branches(norm=True), Branches(norm=True)
            del model.never, expected.never  # its bucket, never full, would hold back those that follow
            prepared, optimizer = strategy.prepare(model, _sgd(model))
            by_hand = _sgd(expected)
            rows = torch.arange(2 * strategy.world_size)
            inputs, targets = _data(len(rows)).tensors
            mine = rows[2 * strategy.rank : 2 * strategy.rank + 2]
            for _ in range(3):
                strategy.step(mse_loss(prepared(inputs[mine], strategy.rank), targets[mine]), optimizer)
                by_hand.zero_grad()
                trunk = torch.tanh(expected.norm(expected.trunk(inputs)))
                outputs = expected.left(trunk[:2])
                if strategy.world_size > 1:
                    outputs = torch.cat([outputs, expected.right(trunk[2:])])
                mse_loss(outputs, targets).backward()  # type: ignore[no-untyped-call]
                by_hand.step()
            _assert_same(model, expected)


def tied_and_frozen(world: World) -> None:
    with world.open() as strategy:
        model, expected = Tied(), Tied()
        prepared, optimizer = strategy.prepare(model, _sgd(model))
        assert model.last.weight is model.middle.weight
        _steps(strategy, prepared, optimizer, expected, _sgd(expected), 3)
        _assert_same(model, expected)
        assert torch.equal(model.first.weight, Tied().first.weight)


class Tied(nn.Module):
    """The second and third layer share a weight; the first is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(4, 4).requires_grad_(False)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.middle.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return out[:, :2]


def _steps(
    strategy: Strategy, prepared: nn.Module, optimizer: Optimizer, expected: nn.Module, by_hand: Optimizer, steps: int
) -> None:
    """Train both for some steps: one on this rank's rows, the other on all."""
    inputs, targets, share = _two_rows_each(strategy)
    for _ in range(steps):
        strategy.step(mse_loss(prepared(inputs[share]), targets[share]), optimizer)
        by_hand.zero_grad()
        mse_loss(expected(inputs), targets).backward()  # type: ignore[no-untyped-call]
        by_hand.step()


def optimizers_that_come_and_change(world: World) -> None:
    """Made after prepare, given new groups, a frozen layer freed, and replaced by another for the same parameters."""
    with world.open() as strategy:
        model, expected = Net(), Net()
        for one in (model, expected):
            one.first.requires_grad_(False)
        prepared = strategy.prepare(model)
        optimizer, by_hand = (SGD(one.last.parameters(), lr=0.1, momentum=0.9) for one in (model, expected))
        _steps(strategy, prepared, optimizer, expected, by_hand, 2)
        for one, its in ((model, optimizer), (expected, by_hand)):
            its.add_param_group({"params": list(one.first.parameters()), "lr": 0.05})
        _steps(strategy, prepared, optimizer, expected, by_hand, 2)
        for one in (model, expected):
            one.first.requires_grad_(True)
        _steps(strategy, prepared, optimizer, expected, by_hand, 2)
        assert not torch.equal(model.first.weight, Net().first.weight)
        _steps(strategy, prepared, _sgd(model), expected, _sgd(expected), 2)
        _assert_same(model, expected)
        _assert_bit_equal_on_all_ranks(strategy, model)


def adversaries(world: World, accumulate: int) -> None:
    """A GAN: two models, two optimizers, each loss through both models."""
    with world.open(accumulate=accumulate) as strategy:
        made = [Net(1), Net(2)]
        expected = [Net(1), Net(2)]
        prepared = strategy.prepare(*made)
        optimizers, by_hand = [_sgd(m) for m in made], [_sgd(m) for m in expected]
        generator = torch.Generator().manual_seed(0)
        rows = 2 * strategy.world_size
        share = slice(2 * strategy.rank, 2 * strategy.rank + 2)
        for micro_batch in range(3 * accumulate):
            noise = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
            for which in (0, 1):
                result = strategy.step(_game(prepared, noise[share], which), optimizers[which])
                loss = _game(expected, noise, which) / accumulate
                loss.backward(inputs=list(expected[which].parameters()))  # type: ignore[no-untyped-call]
                assert result.stepped == ((micro_batch + 1) % accumulate == 0)
                if result.stepped:
                    by_hand[which].step()
                    by_hand[which].zero_grad()
        for one, other in zip(made, expected, strict=True):
            _assert_same(one, other)
            _assert_bit_equal_on_all_ranks(strategy, one)


def _game(models: Any, noise: Tensor, which: int) -> Tensor:
    """Return the loss of model 0, the judge, or of model 1, the forger."""
    forged = models[1](noise)
    if which == 0:
        forged = forged.detach()
    judged = models[0](torch.cat([forged, forged], 1)).mean()
    loss: Tensor = judged + models[0](noise).pow(2).mean() if which == 0 else -judged
    return loss


def several_losses_and_optimizers(world: World) -> None:
    """Two losses of one optimizer, in both orders of forward and backward; one loss of two optimizers, weighted."""
    with world.open(clip_norm=1.0) as strategy:
        inputs, targets, share = _two_rows_each(strategy)
        mine, wanted = inputs[share], targets[share]

        model, expected = Net(), Net()
        prepared, optimizer = strategy.prepare(model, _sgd(model))
        by_hand = _sgd(expected)
        for both_forwards_first in (True, False, True):
            first = mse_loss(prepared(mine), wanted)
            if both_forwards_first:
                second = prepared(2 * mine).pow(2).mean()
                strategy.backward(first, optimizer)
            else:
                strategy.backward(first, optimizer)
                second = prepared(2 * mine).pow(2).mean()
            strategy.backward(second, optimizer)
            assert strategy.update(optimizer).stepped
            by_hand.zero_grad()
            (mse_loss(expected(inputs), targets) + expected(2 * inputs).pow(2).mean()).backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
            by_hand.step()
        _assert_same(model, expected)

        pair, other = [Net(1), Net(2)], [Net(1), Net(2)]
        prepared_pair = strategy.prepare(*pair)
        optimizers, by_hands = [_sgd(m) for m in pair], [_sgd(m) for m in other]
        tokens = torch.arange(1.0, strategy.world_size + 1)
        for _ in range(3):
            loss = (prepared_pair[0](mine) * prepared_pair[1](mine)).mean()
            strategy.step(loss, optimizers, weight=float(tokens[strategy.rank]))
            per_rank = (other[0](inputs) * other[1](inputs)).reshape(strategy.world_size, -1).mean(1)
            for its in by_hands:
                its.zero_grad()
            (per_rank * tokens).sum().div(tokens.sum()).backward()
            for one, its in zip(other, by_hands, strict=True):
                nn.utils.clip_grad_norm_(one.parameters(), 1.0)
                its.step()
        for one, its_twin in zip(pair, other, strict=True):
            _assert_same(one, its_twin)
            _assert_bit_equal_on_all_ranks(strategy, one)


def optimizers_of_one_model(world: World) -> None:
    """A step of each for every loss."""
    with world.open() as strategy:
        model, expected = Net(), Net()
        optimizers, by_hand = ([_sgd(m.first), _sgd(m.last)] for m in (model, expected))
        prepared, *optimizers = strategy.prepare(model, *optimizers)
        inputs, targets, mine = _two_rows_each(strategy)
        for turn in ([0, 1], [1, 0], [0, 1]):
            strategy.step(mse_loss(prepared(inputs[mine]), targets[mine]), [optimizers[i] for i in turn])
            expected.zero_grad()
            mse_loss(expected(inputs), targets).backward()  # type: ignore[no-untyped-call]
            for i in turn:
                by_hand[i].step()
        _assert_same(model, expected)
        _assert_bit_equal_on_all_ranks(strategy, model)


def the_module_itself(world: World) -> None:
    """A script may go on with the module that it gave to prepare(): trained right, or refused."""
    with world.open() as strategy:
        model, expected = Net(), Net()
        _, optimizer = strategy.prepare(model, _sgd(model))
        by_hand = _sgd(expected)
        inputs, targets, mine = _two_rows_each(strategy)
        told = ""
        try:
            for _ in range(3):
                strategy.step(mse_loss(model(inputs[mine]), targets[mine]), optimizer)
        except UsageError as error:
            told = str(error)
        assert ("call what prepare() returned" in told) == (world.backend == "ddp" and strategy.world_size > 1)
        if told:
            return
        for _ in range(3):
            by_hand.zero_grad()
            mse_loss(expected(inputs), targets).backward()  # type: ignore[no-untyped-call]
            by_hand.step()
        _assert_same(model, expected)


def gradients_in_the_step_s_hook(world: World) -> None:
    """What an optimizer's pre-hook finds is the gradient of all ranks' mean, which it may change."""
    with world.open() as strategy:
        model, expected = Net(), Net()
        prepared, optimizer = strategy.prepare(model, _sgd(model))
        by_hand = _sgd(expected)
        inputs, targets, mine = _two_rows_each(strategy)
        found: list[Tensor] = []

        def sign(its: torch.optim.Optimizer, *_: Any) -> None:
            for p in (p for group in its.param_groups for p in group["params"]):
                found.append(p.grad.clone())
                p.grad.sign_()

        for one in (optimizer, by_hand):
            one.register_step_pre_hook(sign)
        strategy.step(mse_loss(prepared(inputs[mine]), targets[mine]), optimizer)
        ours = torch.cat([gradient.reshape(-1) for gradient in found])
        found.clear()
        mse_loss(expected(inputs), targets).backward()  # type: ignore[no-untyped-call]
        by_hand.step()
        torch.testing.assert_close(ours, torch.cat([g.reshape(-1) for g in found]), rtol=0, atol=1e-12)
        _assert_same(model, expected)


def steps_by_hand(world: World) -> None:
    """An optimizer that the script steps itself would move each rank its own way."""
    with world.open() as strategy:
        model, other = Net(1), Net(2)
        prepared, optimizer = strategy.prepare(model, _sgd(model))
        inputs, targets = _data(2).tensors
        before = _flat(model)
        mse_loss(prepared(inputs * (strategy.rank + 1)), targets).backward()  # type: ignore[no-untyped-call]
        if strategy.world_size == 1:
            optimizer.step()
            assert not torch.equal(_flat(model), before)
        else:
            for one in (optimizer, _sgd(model)):
                with pytest.raises(UsageError, match="stepped by itself"):
                    one.step()
            assert torch.equal(_flat(model), before)
        alone = _sgd(other)  # a rank may train a model of its own
        other(inputs).sum().backward()
        alone.step()


def nothing_after_close(world: World) -> None:
    """What would go on alone is refused."""
    with world.open() as strategy:
        model = Net()
        prepared, optimizer = strategy.prepare(model, _sgd(model))
    before = _flat(model)
    with pytest.raises(UsageError, match="the strategy is closed"):
        strategy.step(prepared(torch.ones(2, 4, dtype=torch.float64)).sum(), optimizer)
    assert torch.equal(_flat(model), before)
    if strategy.world_size > 1:
        with pytest.raises(UsageError, match=r"all_reduce was called after close\(\)"):
            strategy.all_reduce(torch.ones(1))


def windows_without_a_loader(world: World) -> None:
    """Calls are counted for each optimizer; a window ended early is the mean of what it held."""
    with world.open(accumulate=2) as strategy:
        made, expected = [Net(1), Net(2)], [Net(1), Net(2)]
        prepared = strategy.prepare(*made)
        optimizers, by_hand = [_sgd(m) for m in made], [_sgd(m) for m in expected]
        inputs, targets, mine = _two_rows_each(strategy)
        counts = [0, 0]
        # The second one's windows begin while the first one's are open; at the end one of its is cut short.
        for which in (0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 1):
            counts[which] += 1
            loss = mse_loss(prepared[which](inputs[mine] * counts[which]), targets[mine])
            ends_early = counts == [6, 7]
            strategy.backward(loss, optimizers[which], sync=True if ends_early else None)
            result = strategy.update(optimizers[which])
            loss = mse_loss(expected[which](inputs * counts[which]), targets) / (1 if ends_early else 2)
            loss.backward()  # type: ignore[no-untyped-call]
            assert result.stepped == (counts[which] % 2 == 0 or ends_early)
            if result.stepped:
                by_hand[which].step()
                by_hand[which].zero_grad()
        for one, other in zip(made, expected, strict=True):
            _assert_same(one, other)
            _assert_bit_equal_on_all_ranks(strategy, one)


def losses_of_one_trunk(world: World) -> None:
    """Two losses, one backward each, that share a trunk but not their heads: right, or told apart clearly."""
    with world.open() as strategy:
        model, expected = Branches(), Branches()
        del model.never, expected.never
        prepared, optimizer = strategy.prepare(model, _sgd(model))
        by_hand = _sgd(expected)
        inputs, targets, share = _two_rows_each(strategy)
        try:
            for branch in (0, 1):
                strategy.backward(mse_loss(prepared(inputs[share], branch), targets[share]), optimizer)
            strategy.update(optimizer)
        except UsageError as error:
            told = str(error)
        else:
            told = ""
        assert ("add the losses" in told) == (world.backend == "ddp" and strategy.world_size > 1)
        if told:
            return
        for branch in (0, 1):
            mse_loss(expected(inputs, branch), targets).backward()  # type: ignore[no-untyped-call]
        by_hand.step()
        _assert_same(model, expected)


# ------------------------------------------------------------------------------------------------------- not finite


def _poisoned(out: Tensor, poison: str) -> Tensor:
    """Return a loss: fine, NaN, or NaN with a gradient of 0, as where every label is to be ignored."""
    if poison == "loss":
        return out.sum() * math.nan
    return nn.functional.cross_entropy(out, torch.full((len(out),), -100 if poison == "labels" else 1))


class Poisoned(Net):
    """A model of which, when told so, the last bias or all the way back to the inputs gets infinite gradients."""

    poison = ""

    def __init__(self) -> None:
        super().__init__()
        self.last.bias.register_hook(self._spoil)  # type: ignore[no-untyped-call]

    def _spoil(self, gradient: Tensor) -> Tensor:
        return gradient * math.inf if self.poison == "gradient" else gradient

    def forward(self, x: Tensor) -> Tensor:
        """Go through ``Net``, and spoil what comes back."""
        out = super().forward(x)
        if self.poison == "way back":
            out.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
        return out


def not_finite(world: World, policy: Literal["stop", "skip", "raise"]) -> None:
    """On the last rank, at step 3: every rank does the same there, and no weight is spoilt."""
    for poison in ("loss", "labels", "gradient", "way back"):
        for debug in (False, True) if poison == "gradient" else (False,):
            print(poison, debug)
            with world.open(on_nonfinite=policy, debug=debug) as strategy:
                _meet_poison(strategy, policy, poison)


def _whose(strategy: Strategy, poison: str, bad_rank: int) -> str:
    """Return what is to be said of a poison."""
    if poison in ("loss", "labels"):
        return f"the loss of rank {bad_rank}; first bad parameter: first.weight"
    # What goes bad beside the way back is an average by the time that it is seen, unless every gradient is kept.
    known = poison == "way back" or strategy.config.debug or strategy.world_size == 1
    first = "first.weight" if poison == "way back" else "last.bias"
    return (
        f"a gradient{f' of rank {bad_rank}' if known else ''} (every rank's loss was finite); "
        f"first bad parameter: {first}"
    )


def _meet_poison(strategy: Strategy, policy: str, poison: str) -> None:
    model = Poisoned()
    prepared, optimizer = strategy.prepare(model, _sgd(model))
    bad_rank = strategy.world_size - 1
    printed = io.StringIO()
    steps: list[bool] = []
    ended: BaseException | None = None
    for step in range(1, 6):
        before = _flat(model)
        model.poison = poison if step == 3 and strategy.rank == bad_rank else ""
        loss = _poisoned(prepared(torch.ones(2, 4, dtype=torch.float64) * step), model.poison)
        try:
            with contextlib.redirect_stdout(printed):
                steps.append(strategy.step(loss, optimizer).stepped)
        except (Stopped, NonFiniteError) as error:
            ended = error
            assert torch.equal(_flat(model), before)
            break
        assert _flat(model).isfinite().all()
        assert torch.equal(_flat(model), before) != steps[-1]
    if policy == "skip":
        assert ended is None
        assert steps == [True, True, False, True, True]
    else:
        assert steps == [True, True]
        assert type(ended) is (Stopped if policy == "stop" else NonFiniteError)
        assert not isinstance(ended, Stopped) or ended.code == 3
    said = str(ended) if policy == "raise" else printed.getvalue()
    if policy == "raise" or strategy.is_main:
        assert f"not finite at step 3: {_whose(strategy, poison, bad_rank)}." in said
    else:
        assert said == ""
    _assert_bit_equal_on_all_ranks(strategy, model)


def nan_in_an_empty_batch_is_no_news(world: World) -> None:
    """A learned factor of the loss has the product of 0 and the NaN loss of 0 rows as its gradient."""
    with world.open(on_nonfinite="raise") as strategy:
        model, expected = Uncertain(), Uncertain()
        prepared, optimizer = strategy.prepare(model, _sgd(model))
        by_hand = _sgd(expected)
        for inputs, targets in strategy.dataloader(_data(5), global_batch_size=4):  # 4, then 1
            strategy.step(prepared(inputs, targets), optimizer)
        for rows in (slice(0, 4), slice(4, 5)):
            by_hand.zero_grad()
            inputs, targets = (t[rows] for t in _data(5).tensors)
            expected(inputs, targets).backward()
            by_hand.step()
        _assert_same(model, expected)


def nan_of_a_rank_without_tokens_is_no_news(world: World) -> None:
    """The mean over no tokens is NaN, and so is its gradient; a weight of 0 says that neither counts."""
    with world.open(on_nonfinite="raise") as strategy:
        model, expected = Net(), Net()
        prepared, optimizer = strategy.prepare(model, _sgd(model))
        by_hand = _sgd(expected)
        inputs, targets, mine = _two_rows_each(strategy)
        tokens = torch.ones(len(inputs))
        if strategy.world_size > 1:
            tokens[-2:] = 0  # the last rank has none
        for _ in range(3):
            loss = _token_mean(prepared(inputs[mine]), targets[mine], tokens[mine])
            strategy.step(loss, optimizer, weight=tokens[mine].sum())
            by_hand.zero_grad()
            _token_mean(expected(inputs), targets, tokens).backward()  # type: ignore[no-untyped-call]
            by_hand.step()
        _assert_same(model, expected)


def _token_mean(out: Tensor, targets: Tensor, tokens: Tensor) -> Tensor:
    return ((out - targets).pow(2).mean(1) * tokens).sum() / tokens.sum()


class Uncertain(Net):
    """Kendall, Gal and Cipolla, "Multi-Task Learning Using Uncertainty to Weigh Losses" (CVPR 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        loss = mse_loss(super().forward(x), targets)
        return loss * torch.exp(-self.log_variance) + self.log_variance


# ------------------------------------------------------------------------------------------------ what prepare makes


def preparation(world: World) -> None:
    """Objects stay themselves; weights, buffers and optimizer state become rank 0's."""
    with world.open(sync_batchnorm=True) as strategy:
        model = Net(seed=strategy.rank, norm=True)
        turn = torch.polar(torch.ones(3), torch.full((3,), float(strategy.rank)))
        model.register_buffer("turn", turn)
        model.register_buffer("flag", torch.tensor(strategy.rank == 0), persistent=False)
        parameters = dict(model.named_parameters())
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        for p in model.parameters():
            p.grad = torch.full_like(p, float(strategy.rank + 1))
        optimizer.step()
        optimizer.zero_grad()
        momentum = optimizer.state[model.first.weight]["momentum_buffer"].clone()
        scheduler = StepLR(optimizer, 1)
        keys = list(model.state_dict())

        returned = strategy.prepare(scheduler, model, optimizer)  # in any order
        assert returned[0] is scheduler
        assert returned[2] is optimizer
        assert all(p is parameters[name] for name, p in model.named_parameters())
        assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
        assert torch.equal(optimizer.state[model.first.weight]["momentum_buffer"], strategy.broadcast(momentum))
        assert strategy.unwrap(returned[1]) is model
        assert strategy.unwrap(model) is model
        assert list(strategy.unwrap(returned[1]).state_dict()) == keys
        assert torch.equal(model.get_buffer("turn").to(torch.cfloat), torch.ones(3, dtype=torch.cfloat))
        assert bool(model.get_buffer("flag"))
        everyone = strategy.all_gather(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        assert all(torch.equal(one, everyone[0]) for one in everyone)
        with pytest.raises(UsageError, match="prepared before"):
            strategy.prepare(model)
        with pytest.raises(UsageError, match="prepared before"):
            strategy.prepare(returned[1])
        with pytest.raises(UsageError, match="takes modules, optimizers and schedulers, not list"):
            strategy.prepare([model])
        if strategy.world_size > 1:
            with pytest.raises(UsageError, match="1 parameters of no prepared module"):
                strategy.prepare(SGD([nn.Parameter(torch.ones(2))], lr=0.1))


def copies_and_exports(world: World) -> None:
    """An average of the weights is a deep copy that works by itself; an export is a plain model."""
    with world.open(sync_batchnorm=True, precision="bf16") as strategy:
        model = Net(norm=True).float()
        prepared, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
        average = copy.deepcopy(prepared)
        x = torch.randn(4, 4) + strategy.rank
        with strategy.evaluation(prepared, average):
            assert torch.equal(average(x), prepared(x))
            assert average(x).dtype == torch.bfloat16
        strategy.step(prepared(x).float().pow(2).mean(), optimizer)
        with strategy.evaluation(prepared, average):
            assert not torch.equal(average(x), prepared(x))
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), prepared.parameters(), strict=True):
                ours.lerp_(theirs, 0.5)
        assert all(p.grad is None for p in average.parameters())
        strategy.step(prepared(x).float().pow(2).mean(), optimizer)  # the copy has not got in the way
        assert list(strategy.unwrap(average).state_dict()) == list(model.state_dict())
        assert type(strategy.export(average)) is Net

        exported = strategy.export(prepared)
        plain = Net(norm=True).float()
        assert [type(layer) for layer in exported.modules()] == [type(layer) for layer in plain.modules()]
        assert list(exported.state_dict()) == list(plain.state_dict())
        for layer, other in zip(exported.modules(), plain.modules(), strict=True):
            assert set(vars(layer)) == set(vars(other))
            assert not any(getattr(layer, name) for name in vars(layer) if "hooks" in name)
        assert not exported.training
        assert exported(x).dtype == torch.float32
        torch.save(exported, io.BytesIO())
    # and after the end
    assert strategy.unwrap(prepared) is model
    assert type(strategy.export(prepared)) is Net


def compiled(world: World) -> None:
    with world.open() as strategy:
        model, expected = Net(), Net()
        made: Any = torch.compile(model, backend="eager")
        prepared, optimizer = strategy.prepare(made, _sgd(model))
        _steps(strategy, prepared, optimizer, expected, _sgd(expected), 2)
        _assert_same(model, expected)
        assert strategy.unwrap(prepared) is model
        assert type(strategy.export(prepared)) is Net
        later = Net()
        compiled_last: Any = torch.compile(strategy.prepare(later), backend="eager")
        assert strategy.unwrap(compiled_last) is later


def evaluation(world: World) -> None:
    """Modes come back as they were; running statistics are averaged; an evaluation in mid-epoch weighs nothing."""
    with world.open() as strategy:
        model, expected = Net(norm=True), Net()
        model.first.eval()
        prepared, optimizer = strategy.prepare(model, _sgd(model))
        assert isinstance(model.norm, nn.BatchNorm1d)
        prepared(torch.full((2, 4), float(strategy.rank), dtype=torch.float64) + torch.eye(2, 4))
        means = strategy.all_gather(model.norm.running_mean)  # type: ignore[arg-type]
        with contextlib.suppress(ZeroDivisionError), strategy.evaluation(prepared):
            assert not prepared.training
            assert not torch.is_grad_enabled()
            torch.testing.assert_close(model.norm.running_mean, means.mean(0))
            raise ZeroDivisionError
        assert [m.training for m in (model, model.first, model.norm, model.last)] == [True, False, True, True]
        assert torch.is_grad_enabled()

        plain, by_hand = Net(), _sgd(expected)
        prepared, optimizer = strategy.prepare(plain, _sgd(plain))
        test = strategy.dataloader(_data(7), batch_size=2)
        seen = strategy.meter()
        for inputs, targets in strategy.dataloader(_data(), global_batch_size=9):
            loss = mse_loss(prepared(inputs), targets)
            with strategy.evaluation(prepared):
                for rows, _ in test:
                    seen.add(total=float(len(rows)), count=len(rows))
            strategy.step(loss, optimizer)
        inputs, targets = _data().tensors
        for start in range(0, SAMPLES, 9):
            by_hand.zero_grad()
            mse_loss(expected(inputs[start : start + 9]), targets[start : start + 9]).backward()  # type: ignore[no-untyped-call]
            by_hand.step()
        _assert_same(plain, expected)
        assert seen.count() == 3 * 7


# ------------------------------------------------------------------------------------------------------------ errors


def different_models(world: World) -> None:
    """Every rank says which parameter differs, and none waits for another."""
    with world.open(precision="fp32") as strategy:
        odd = strategy.rank == strategy.world_size - 1
        for model, name in [
            (nn.Sequential(nn.Linear(4, 3 if odd else 2)), "0.weight"),
            (nn.Sequential(nn.Linear(4, 2, bias=not odd)), "0.bias"),
            (nn.Sequential(nn.Linear(4, 2).half() if odd else nn.Linear(4, 2)), "0.weight"),
        ]:
            with pytest.raises(CommunicationError, match=f"different models: .*{name}"):
                strategy.prepare(model)
        assert float(strategy.all_reduce(torch.ones(()))) == strategy.world_size


def collective_of_one_rank(world: World) -> None:
    """A rank that waits for others who never come gets an error within ``timeout_s``, not a hang."""
    strategy = world.open(timeout_s=3)
    if strategy.rank == 0:
        strategy.all_reduce(torch.ones(1))
    time.sleep(60)
