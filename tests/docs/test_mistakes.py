"""The table of mistakes in docs/migrating/moving.md: two ranks make each, and say what the table says, or train alike.

A row that another test makes good names it: what ends the processes can't be tried here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from places import ROOT, TESTS
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset, TensorDataset

import unitrain
from unitrain import Strategy
from unitrain.data import Loader

PAGE = ROOT / "docs" / "migrating" / "moving.md"
DATA = TensorDataset(
    torch.randn(48, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(48) % 3
)
Mistake = Callable[["Script"], Any]
Step = Callable[["Script", Tensor, Tensor], Any]
MISTAKES: dict[str, tuple[dict[str, Any], Mistake]] = {}
ELSEWHERE = {
    "calls a collective under `if strategy.is_main:`": ("faults/test_ends.py", "test_a_collective_that_only_one_calls"),
    "reads a meter's `value()` on rank 0 only": ("faults/test_ends.py", "test_a_collective_that_only_one_calls"),
    "skips `strategy.step` on one rank (a `continue` when its loss looks bad), or leaves the epoch": (
        "job/test_failures.py",
        "test_a_rank_that_trains_on_other_batches_ends_the_job",
    ),
}


def mistake(row: str, **settings: Any) -> Callable[[Mistake], Mistake]:
    """Record what a row of the table describes, and the settings of its run."""

    def record(function: Mistake) -> Mistake:
        MISTAKES[row] = settings, function
        return function

    return record


def mistake_in_step(row: str, **settings: Any) -> Callable[[Step], Step]:
    """Record the step of a row, with which a script trains."""

    def record(step: Step) -> Step:
        MISTAKES[row] = settings, lambda script: script.train(partial(step, script))
        return step

    return record


class Script:
    """A script, of which a mistake changes a part."""

    def __init__(self, strategy: Strategy, folder: Path) -> None:
        self.strategy = strategy
        self.folder = folder
        self.model: nn.Module = nn.Linear(4, 3).double()
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler: Any = StepLR(self.optimizer, 4, gamma=0.5)
        self.original = self.model
        self.steps = 0

    def prepare(self) -> None:
        self.model, self.optimizer = self.strategy.prepare(self.model, self.optimizer)

    def loader(self, **options: Any) -> Loader:
        return self.strategy.dataloader(DATA, global_batch_size=12, **options)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.strategy.step(cross_entropy(self.model(x), y), self.optimizer, self.scheduler)

    def epoch(self, batches: Iterable[Any], step: Callable[..., Any] | None = None) -> None:
        for x, y in batches:
            (step or self.step)(x, y)

    def epochs(self, loader: Loader, step: Callable[..., Any] | None = None) -> None:
        for _ in loader.epochs(2):
            self.epoch(loader, step)

    def train(self, step: Callable[..., Any] | None = None) -> None:
        self.prepare()
        self.epochs(self.loader(shuffle=True), step)

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.strategy.unwrap(self.model).parameters()]


# ------------------------------------------------------------------------------------------------- in the step


@mistake_in_step("calls `optimizer.step()` itself")
def own_step(script: Script, x: Tensor, y: Tensor) -> None:
    cross_entropy(script.model(x), y).backward()  # type: ignore[no-untyped-call]
    script.optimizer.step()


@mistake_in_step("calls `loss.backward()` before `strategy.step`")
def own_backward(script: Script, x: Tensor, y: Tensor) -> None:
    loss = cross_entropy(script.model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    script.strategy.step(loss, script.optimizer)


@mistake_in_step("calls `optimizer.zero_grad()` before each step")
@mistake_in_step("calls `optimizer.zero_grad()` within an accumulation window", accumulate=2)
def own_zero_grad(script: Script, x: Tensor, y: Tensor) -> None:
    script.optimizer.zero_grad()
    script.step(x, y)


@mistake_in_step("calls `clip_grad_norm_` before or after `strategy.step`, which clips nothing: set `clip_norm`")
def own_clipping(script: Script, x: Tensor, y: Tensor) -> None:
    clip_grad_norm_(script.model.parameters(), 0.01)
    script.step(x, y)
    clip_grad_norm_(script.model.parameters(), 0.01)


@mistake_in_step("calls the module that it gave to `prepare`")
def original_called(script: Script, x: Tensor, y: Tensor) -> None:
    script.strategy.step(cross_entropy(script.original(x), y), script.optimizer, script.scheduler)


@mistake_in_step("skips `strategy.step` for a micro-batch of an accumulation window", accumulate=2)
def skipped(script: Script, x: Tensor, y: Tensor) -> None:
    script.steps += 1
    if script.steps != 3:
        script.step(x, y)


@mistake_in_step("calls `scheduler.step()` in the loop, and passes it to `strategy.step`")
def stepped_twice(script: Script, x: Tensor, y: Tensor) -> None:
    script.step(x, y)
    script.scheduler.step()


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "divides the loss by `accumulate`": lambda out, y: cross_entropy(out, y) / 4,
    "divides the loss by the number of processes": lambda out, y: cross_entropy(out, y) / 2,
    "scales the loss with a `GradScaler`": lambda out, y: torch.amp.GradScaler("cpu").scale(cross_entropy(out, y)),
    "has class weights in its loss, without `weight=`": lambda out, y: cross_entropy(
        out, y, torch.arange(1.0, 4).double()
    ),
    "ignores targets with `ignore_index`, without `weight=`": lambda out, y: nll_loss(
        out, torch.where(y == 2, -100, y)
    ),
    'passes a loss of each sample (`reduction="none"`)': partial(cross_entropy, reduction="none"),
    'passes a loss that is a sum (`reduction="sum"`)': partial(cross_entropy, reduction="sum"),
    "passes `loss.item()`": lambda out, y: cross_entropy(out, y).item(),
    "passes a detached loss": lambda out, y: cross_entropy(out.detach(), y),
}


def step_with(loss: Callable[[Tensor, Tensor], Any], script: Script, x: Tensor, y: Tensor) -> None:
    script.strategy.step(loss(script.model(x), y), script.optimizer)


for _row, _loss in LOSSES.items():
    mistake_in_step(_row, accumulate=4 if "accumulate" in _row else 1)(partial(step_with, _loss))


# -------------------------------------------------------------------------------------------------- in one call

CALLS: dict[str, Mistake] = {
    "has an `nn.Embedding` with `max_norm`": lambda script: script.strategy.prepare(nn.Embedding(4, 2, max_norm=1.0)),
    "does not prepare the model": lambda script: script.epoch(script.loader()),
    "calls `unitrain.init` twice": lambda script: unitrain.init(backend="ddp"),
    "passes a `DataLoader` to `prepare`": lambda script: script.strategy.prepare(script.model, DataLoader(DATA)),
    "passes a `DistributedSampler`": lambda script: script.loader(
        sampler=DistributedSampler(DATA, 2, script.strategy.rank)
    ),
    "calls `set_epoch` of a loader": lambda script: script.loader().set_epoch(1),
    "calls `meter.add(value, n)` without names": lambda script: script.strategy.meter().add(1.0, 2),  # type: ignore[call-overload]
}
MISTAKES |= {row: ({}, call) for row, call in CALLS.items()}


@mistake("passes another dataset on each rank")
def other_data(script: Script) -> None:
    next(iter(script.strategy.dataloader(Subset(DATA, range(script.strategy.rank, 48)), global_batch_size=12)))


@mistake("has a sampler that draws other indices on each rank")
def other_indices(script: Script) -> None:
    generator = torch.Generator().manual_seed(script.strategy.rank)
    next(iter(script.loader(sampler=RandomSampler(DATA, generator=generator))))


@mistake("uses an attribute of the module on what `prepare` returned")
def attribute_of_wrapper(script: Script) -> None:
    script.prepare()
    assert script.model.in_features == 4


@mistake("passes LBFGS to `strategy.step`, without [a closure](../training/closures.md)")
def lbfgs(script: Script) -> None:
    script.optimizer = torch.optim.LBFGS(script.model.parameters())
    script.train()


# ---------------------------------------------------------------------------------------- models and optimizers


@mistake("wraps the model in `DistributedDataParallel` first")
def own_ddp(script: Script) -> None:
    script.model = DistributedDataParallel(script.model)
    script.prepare()


@mistake("prepares the model alone, and steps with its optimizer")
@mistake("makes the optimizer before `prepare`, and does not pass it, under fsdp", backend="fsdp")
def optimizer_unprepared(script: Script) -> None:
    script.model = script.strategy.prepare(script.model)
    script.epochs(script.loader(shuffle=True))


@mistake("prepares an optimizer of another model (a copy, say)")
def optimizer_of_a_copy(script: Script) -> None:
    script.optimizer = SGD(nn.Linear(4, 3).double().parameters(), lr=0.1)
    script.prepare()


@mistake("draws the initial weights from another seed on each rank")
def seeded_by_rank(script: Script) -> None:
    with torch.no_grad():
        for p in script.model.parameters():
            p.add_(script.strategy.rank)
    script.train()


@mistake("passes a `ReduceLROnPlateau` to `strategy.step`")
def plateau_passed(script: Script) -> None:
    script.scheduler = ReduceLROnPlateau(script.optimizer)
    script.train()


@mistake("steps a `ReduceLROnPlateau` with another metric on each rank")
def plateau_by_rank(script: Script) -> None:
    script.scheduler = None
    plateau = ReduceLROnPlateau(script.optimizer, patience=0)
    script.prepare()
    loader = script.loader()
    for epoch in loader.epochs(3):
        script.epoch(loader)
        plateau.step(epoch if script.strategy.rank else -epoch)


@mistake("sets an option of the optimizer on rank 0 only")
def option_of_rank_0(script: Script) -> None:
    if script.strategy.is_main:
        script.optimizer.param_groups[0]["weight_decay"] = 0.5
    script.train()


@mistake("loads weights on rank 0 only, after `prepare`")
def weights_of_rank_0(script: Script) -> None:
    script.prepare()
    if script.strategy.is_main:
        script.strategy.unwrap(script.model).load_state_dict(nn.Linear(4, 3).double().state_dict())
    script.epoch(script.loader())


@mistake("changes weights in its forward, under fsdp", backend="fsdp")
def changed_in_forward(script: Script) -> None:
    class Bounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    script.model = Bounded(4, 3).double()
    script.optimizer = SGD(script.model.parameters(), lr=0.1)
    script.train()


@mistake("ties weights after `prepare`, under fsdp", backend="fsdp")
def tied_late(script: Script) -> None:
    script.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    script.optimizer = SGD(script.model.parameters(), lr=0.1)
    script.prepare()
    script.model[1].weight = script.model[0].weight
    script.model(torch.ones(2, 4).double())


# --------------------------------------------------------------------------------------------------------- data


@mistake("passes a `DataLoader` to `strategy.dataloader`: its `batch_size` is per process")
def data_loader_given(script: Script) -> None:
    script.prepare()
    script.epochs(script.strategy.dataloader(DataLoader(DATA, 6, shuffle=True)))


@mistake("trains on a shuffled torch `DataLoader`")
def plain_data_loader(script: Script) -> None:
    script.prepare()
    script.epoch(DataLoader(DATA, 6, shuffle=True))


@mistake("computes the same batches on all ranks")
def same_batches(script: Script) -> None:
    script.prepare()
    script.epoch(DATA[start : start + 12] for start in range(0, 48, 12))


# ------------------------------------------------------------------------------------- metrics and checkpoints


@mistake("computes a torchmetrics metric that it did not synchronise")
def metric_unpassed(script: Script) -> None:
    metric = torchmetrics.SumMetric()
    metric.update(1.0)
    metric.compute()


@mistake("reads a meter or computes a metric in a function passed to `strategy.on_main`")
def collective_on_main(script: Script) -> None:
    meter = script.strategy.meter()
    meter.add(mean=1.0, count=2)
    script.strategy.on_main(meter.value)


@mistake("saves checkpoints without the optimizer, the scheduler, the loader or the EMA")
def checkpoint_of_a_model(script: Script) -> None:
    checkpoint = script.strategy.checkpoint(script.folder, model=script.model)
    script.train()
    checkpoint.save()


@mistake("counts epochs with `range()` after a resume")
def range_after_resume(script: Script) -> None:
    script.prepare()
    for _ in range(2):
        loader = script.loader()
        objects = {"model": script.model, "optimizer": script.optimizer, "scheduler": script.scheduler}
        checkpoint = script.strategy.checkpoint(script.folder, background=False, loader=loader, **objects)
        checkpoint.resume()
        for _ in range(2):
            script.epoch(loader)
            checkpoint.save()
        checkpoint.close()


# ---------------------------------------------------------------------------------------------------------- the table


def rows() -> dict[str, str]:
    """Return what the page's table says of each mistake."""
    section = PAGE.read_text().partition("\n## What UniTrain says")[2].partition("\n## ")[0]
    cells = [re.findall(r"\| (.*?) (?=\|)", line) for line in section.splitlines() if line.startswith("| ")]
    return dict(cells[1:])


def base(folder: Path) -> list[Tensor]:
    """Return the weights that a script without a mistake trains."""
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        script = Script(strategy, folder)
        script.train()
        return script.weights


def make(row: str, folder: Path) -> tuple[str, list[Tensor]]:
    """Make a mistake. Return what is said, with its kind, and the weights."""
    settings, function = MISTAKES[row]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with unitrain.init(**{"backend": "ddp", "device": "cpu", "timeout_s": 30, **settings}) as strategy:
            script = Script(strategy, folder)
            try:
                function(script)
            except (unitrain.UnitrainError, AttributeError, RuntimeError, TypeError) as error:
                return f"error: {error}", []
            weights = script.weights
    own = [f"warning: {one.message}" for one in seen if issubclass(one.category, UserWarning)]
    return "\n".join(own) or "right", weights


@pytest.mark.parametrize("row", MISTAKES)
def test_a_mistake_ends_as_the_table_says(row: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("mistake")
    (first, weights), (other, _) = run_ranks(make, row, folder)
    kind, *parts = re.split(r": | … ", rows()[row], maxsplit=0)
    assert first.startswith(kind), first
    assert re.search(".*".join(map(re.escape, parts)), first, re.DOTALL), first
    if kind == "error":
        assert other.startswith("error: "), other  # on every rank
    if kind == "right":
        for one, expected in zip(weights, run_ranks(base, folder)[0], strict=True):
            assert torch.allclose(one, expected, rtol=0, atol=1e-12)


def test_each_row_has_its_test() -> None:
    assert set(rows()) == MISTAKES.keys() | ELSEWHERE.keys()
    assert len(rows()) >= 30
    for file, name in ELSEWHERE.values():
        assert f"def {name}(" in (TESTS / file).read_text()
