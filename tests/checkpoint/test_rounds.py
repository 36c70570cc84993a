"""Runs of rounds, in which models and loaders come and go: stopped anywhere, and resumed on other numbers of ranks."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Subset, TensorDataset

import unitrain
from unitrain import CheckpointError, Stopped, UsageError
from unitrain.errors import UnitrainError
from unitrain.job.watch.boundaries import Boundaries
from unitrain.job.watch.stopping import RAISE_ERROR, SIGNAL, Stopping
from unitrain.pulse import Pulse

ROUNDS, EPOCHS, BATCH, MORE = 4, 2, 4, 3
INPUTS = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TARGETS = INPUTS.sum(1, keepdim=True).sin()
Fault = tuple[int, int, int]
"""At which event, the signal, and the rank that gets it."""


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def plain(kind: str) -> Tensor:
    """Return the weights of a loop without UniTrain."""
    model, optimizer = made(0)
    pool, labels = list(range(6)), TARGETS
    for number in range(ROUNDS):
        if kind == "active":
            model, optimizer = made(number)
        elif kind == "whole":
            labels = (TARGETS + model(INPUTS).detach()) / 2
        for _, indices in itertools.product(range(EPOCHS), torch.split(torch.tensor(pool), BATCH)):
            optimizer.zero_grad()
            loss: Any = mse_loss(model(INPUTS[indices]), labels[indices])
            loss.backward()
            optimizer.step()
        if kind == "active":
            rest = [index for index in range(len(INPUTS)) if index not in pool]
            pool += [rest[best] for best in model(INPUTS[rest]).flatten().topk(MORE).indices]
        elif kind == "self":
            labels = (TARGETS + model(INPUTS).detach()) / 2
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(folder: Path, backend: str, kind: str, fault: Fault | None = None) -> Tensor:
    """Train in rounds up to the end or the fault. Return the weights.

    Args:
        folder: of the checkpoints.
        backend: of the run.
        kind: "active": each round has a new model and its loader, and adds data. "self": one model, which labels the
            data of each round. Both are saved within a round. "whole": as "self", but a round is saved whole.
        fault: the failure.
    """
    copies = {"every": 1, "folder": str(folder / "memory")}
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=30, memory_copies=copies) as strategy:
        events = itertools.count()

        def event() -> None:
            if fault is not None and (next(events), strategy.rank) == fault[::2]:
                os.kill(os.getpid(), fault[1])
                time.sleep(0.3)  # until the watch has seen it

        def predicted(indices: list[int]) -> Tensor:
            loader = strategy.dataloader(Subset(TensorDataset(INPUTS), indices), global_batch_size=BATCH)
            outputs = []
            with strategy.evaluation(model):
                for (inputs,) in loader:
                    event()
                    outputs.append(strategy.gather(model(inputs), in_order=loader))
            return torch.cat(outputs)

        state: dict[str, Any] = {"round": 0, "pool": list(range(6)), "labels": TARGETS.clone()}
        lasting: dict[str, Any] = {"state": state}
        if kind != "active":
            model, optimizer = strategy.prepare(*made(0))
            lasting |= {"model": model, "optimizer": optimizer}
        checkpoint = strategy.checkpoint(folder / "run", partial=True, **lasting)
        checkpoint.resume()

        def train_round() -> None:
            for _ in loader.epochs(EPOCHS):
                for inputs, targets in loader:
                    event()
                    strategy.step(mse_loss(model(inputs), targets), optimizer)
                checkpoint.save()

        while state["round"] < ROUNDS:
            event()
            if kind == "whole":
                with checkpoint.round():
                    everything = list(range(len(INPUTS)))
                    state["labels"] = (TARGETS + predicted(everything)) / 2
                    data = Subset(TensorDataset(INPUTS, state["labels"]), state["pool"])
                    loader = strategy.dataloader(data, global_batch_size=BATCH)
                    train_round()
                    state["round"] += 1
                continue
            if kind == "active":
                model, optimizer = strategy.prepare(*made(state["round"]))
                checkpoint.add(model=model, optimizer=optimizer)
            data = Subset(TensorDataset(INPUTS, state["labels"]), state["pool"])
            loader = strategy.dataloader(data, global_batch_size=BATCH)
            checkpoint.add(loader=loader)
            train_round()
            with checkpoint.round():
                if kind == "active":
                    rest = [index for index in range(len(INPUTS)) if index not in state["pool"]]
                    state["pool"] += [rest[best] for best in predicted(rest).flatten().topk(MORE).indices]
                    if state["round"] < ROUNDS - 1:
                        checkpoint.remove("model", "optimizer", "loader")
                else:
                    state["labels"] = (TARGETS + predicted(list(range(len(INPUTS))))) / 2
                    checkpoint.remove("loader")
                state["round"] += 1
        return torch.cat([strategy.full_tensor(p.detach()).flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("kind", "backend", "seed"),
    [
        ("active", "ddp", 0),
        ("active", "ddp", 1),
        ("self", "ddp", 0),
        ("whole", "ddp", 1),
        ("active", "horovod", 3),
        ("whole", "fsdp", 2),
        *(pytest.param(kind, "ddp", 7, marks=pytest.mark.all("other moments")) for kind in ("active", "self", "whole")),
    ],
)
def test_rounds_disturbed_at_random_moments_end_with_the_weights_of_a_plain_loop(
    tmp_path: Path, kind: str, backend: str, seed: int
) -> None:
    moments = random.Random(seed)
    for number, nprocs in ((signal.SIGKILL, 2), (signal.SIGTERM, 3 if backend == "ddp" else 2)):
        fault = moments.randrange(2, 20), number, moments.randrange(nprocs)
        with pytest.raises((Stopped, UnitrainError)):
            run_ranks(train, tmp_path, backend, kind, fault, nprocs=nprocs)
    for weights in run_ranks(train, tmp_path, backend, kind, nprocs=2 if backend == "ddp" else 1):
        torch.testing.assert_close(weights, plain(kind), rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------------------- a resume in two stages


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[unitrain.Strategy, Path, Tensor]]:
    """Yield a strategy, the folder of a checkpoint of three objects, and the random number that follows it."""
    with unitrain.init(backend="single", precision="fp64") as strategy:
        model, optimizer = made(0)
        checkpoint = strategy.checkpoint(tmp_path, state={"round": 3}, model=model, optimizer=optimizer)
        checkpoint.save()
        following = torch.rand(1)
        checkpoint.close()
        yield strategy, tmp_path, following


def test_objects_are_loaded_when_they_are_added(
    saved: tuple[unitrain.Strategy, Path, Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    strategy, folder, following = saved
    state: dict[str, int] = {}
    checkpoint = strategy.checkpoint(folder, state=state)
    assert checkpoint.resume()
    assert state == {"round": 3}
    model, optimizer = strategy.prepare(*made(1))
    optimizer.param_groups[0]["lr"] = 0.9
    checkpoint.add(model=model)
    checkpoint.add(optimizer=optimizer)
    assert torch.equal(torch.rand(1), following), "making a model draws random numbers"
    assert torch.equal(next(model.parameters()), next(made(0)[0].parameters()))
    place = f"unitrain: resumed after step 0, from {folder}/step-0000000000"
    lines = capfd.readouterr().err.splitlines()
    assert lines[:3] == [
        f"{place}; checkpoint.add loads model, optimizer",
        f"{place}: model; checkpoint.add loads optimizer",
        f"{place}: optimizer",
    ]
    assert "optimizer's lr is 0.05, not 0.9" in lines[3]
    strategy.step(model(INPUTS).sum(), optimizer)
    old = weakref.ref(model)
    checkpoint.add(model=made(2)[0])
    del model, optimizer
    checkpoint.remove("optimizer")
    gc.collect()
    assert old() is None
    checkpoint.save()
    checkpoint.wait()
    assert sorted(path.name for path in folder.glob("step-0000000001/*.pt")) == ["_run.pt", "model.pt", "state.pt"]


def test_a_wrong_name_or_shape_is_one_error_and_nothing_is_loaded(
    saved: tuple[unitrain.Strategy, Path, Tensor],
) -> None:
    strategy, folder, _ = saved
    checkpoint = strategy.checkpoint(folder, state={})
    checkpoint.resume()
    model, optimizer = made(1)
    weights = next(model.parameters()).clone()
    with pytest.raises(
        CheckpointError, match="contains model, optimizer, state, but this run has modle, optimizer, state"
    ):
        checkpoint.add(modle=model, optimizer=optimizer)
    checkpoint.remove("modle")
    with pytest.raises(CheckpointError, match=r"0\.weight is \(8, 3\) float64 in the checkpoint, but \(9, 3\) float32"):
        checkpoint.add(model=nn.Sequential(nn.Linear(3, 9)), optimizer=optimizer)
    assert not optimizer.state
    assert torch.equal(weights, next(model.parameters()))
    checkpoint.add(model=model, optimizer=optimizer)
    assert not torch.equal(weights, next(model.parameters()))
    with pytest.raises(UsageError, match="there is no 'modle' beside model, optimizer, state"):
        checkpoint.remove("modle")


def test_a_state_that_nobody_takes_is_an_error(saved: tuple[unitrain.Strategy, Path, Tensor]) -> None:
    strategy, folder, _ = saved
    checkpoint = strategy.checkpoint(folder, state={}, partial=True)
    checkpoint.resume()
    model, optimizer = strategy.prepare(*made(1))
    weights = next(model.parameters()).clone()
    said = r"no object has taken its states of model, optimizer: pass .* to checkpoint\.add\(model=model, optimizer=opt"
    with pytest.raises(CheckpointError, match=said):
        strategy.step(model(INPUTS).sum(), optimizer)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.save()
    assert torch.equal(weights, next(model.parameters()))
    assert checkpoint.save_now() == f"{folder}/step-0000000000", "a signal before the second stage"
    checkpoint.remove("model", "optimizer")
    strategy.step(model(INPUTS).sum(), optimizer)
    checkpoint.save()


def add_on(folder: Path) -> tuple[list[str], int]:
    """Resume, and do what is refused on all ranks; return the errors, and the value that was loaded."""
    errors = []
    with unitrain.init(backend="ddp", precision="fp64", device="cpu", timeout_s=30) as strategy:
        model, optimizer = strategy.prepare(*made(0))
        state = {"round": strategy.rank}
        checkpoint = strategy.checkpoint(folder, model=model)
        if checkpoint.resume():
            for call in (
                lambda: checkpoint.add(state=state if strategy.is_main else nn.Linear(1, 1)),
                lambda: strategy.step(model(INPUTS).sum(), optimizer),
                checkpoint.save,
                lambda: checkpoint.add(state=state),
            ):
                try:
                    call()
                except CheckpointError as error:
                    errors.append(str(error))
        else:
            checkpoint.add(state={"round": 5})
            checkpoint.save()
        return errors, state["round"]


def test_a_copy_in_memory_stays_as_long_as_states_in_it_wait(tmp_path: Path) -> None:
    def start(*, fails: bool) -> int:
        copies = {"every": 1, "folder": str(tmp_path / "memory")}
        with unitrain.init(backend="single", precision="fp64", memory_copies=copies) as strategy:
            state = {"round": 0}
            checkpoint = strategy.checkpoint(tmp_path / "run", state=state)
            checkpoint.resume()
            if fails:
                model, optimizer = strategy.prepare(*made(0))
                checkpoint.add(model=model, optimizer=optimizer)
                state["round"] = 3
                strategy.step(model(INPUTS).sum(), optimizer)
                raise RuntimeError
            assert checkpoint.save_now().startswith(str(tmp_path / "memory"))
            return state["round"]

    with pytest.raises(RuntimeError):
        start(fails=True)
    assert [start(fails=False), start(fails=False)] == [3, 3]


def test_all_ranks_refuse_what_one_of_them_can_not_load(tmp_path: Path) -> None:
    run_ranks(add_on, tmp_path)
    for errors, loaded in run_ranks(add_on, tmp_path):
        assert [error.partition(": ")[2][:30] for error in errors] == [
            "the checkpoint belongs to anot", "pass the objects to checkpoint", "pass the objects to checkpoint",
        ]  # fmt: skip
        assert loaded == 5


# -------------------------------------------------------------------------------------------- what waits for the end


def test_saves_and_copies_wait_for_the_end_of_a_round(tmp_path: Path) -> None:
    copies = {"every": 1, "folder": str(tmp_path / "memory")}
    with unitrain.init(backend="single", precision="fp64", memory_copies=copies) as strategy:
        model, optimizer = strategy.prepare(*made(0))
        checkpoint = strategy.checkpoint(tmp_path / "run", model=model, optimizer=optimizer, background=False)

        def written() -> list[list[str]]:
            return [sorted(path.name for path in tmp_path.glob(name)) for name in ("run/step*", "memory/*/step*")]

        with checkpoint.round():
            for _ in range(2):
                strategy.step(model(INPUTS).sum(), optimizer)
                checkpoint.save(best=True)
            assert written() == [[], []]
            with pytest.raises(UsageError, match="within a round"), checkpoint.round():
                pass
        assert written() == [["step-0000000002"], ["step-0000000002.1"]]
        with pytest.raises(UsageError, match=r"call checkpoint\.remove\('model'\) within the round"):
            checkpoint.add(model=model)
        with pytest.raises(UsageError, match="within an accumulation window"), checkpoint.round():
            strategy.backward(model(INPUTS).sum())


class Alone:
    """The stops of a single process."""

    def __init__(self) -> None:
        self.boundaries = Boundaries(pulse := Pulse())
        self.stopping = Stopping(self.boundaries, pulse, None, is_main=True)
        self.calls: list[int | str] = []
        self.stopping.add_action("feature", self.calls.append)

    def round(self, *kinds: str, error: Exception | None = None) -> None:
        """Run a round, within which there are requests and boundaries."""
        with self.stopping.round():
            for kind in kinds:
                self.stopping.request(kind, signal.SIGTERM)
                for _ in range(3):
                    self.stopping.pass_boundary()
            if error is not None:
                raise error
        self.calls.append("end")
        self.stopping.pass_boundary()

    def wait(self) -> None:
        raise CheckpointError("the disk is full")

    def save_now(self) -> str:
        self.calls.append("save")
        return "there"

    def close(self) -> None: ...

    def abandon(self) -> None: ...


def test_a_signal_waits_for_the_end_of_a_round_and_says_when_it_began(capfd: pytest.CaptureFixture[str]) -> None:
    alone = Alone()
    alone.stopping.checkpoint = alone
    alone.round()
    with pytest.raises(Stopped) as stopped:
        alone.round(SIGNAL)
    assert (stopped.value.code, alone.calls) == (143, ["end", "end", "save"])
    alone.stopping.round_began = time.monotonic() - 7  # as a thread sees it that receives the signal
    alone.stopping._receive(signal.SIGTERM)
    assert capfd.readouterr().out.splitlines() == [
        "unitrain: stopped by SIGTERM after step 0 and saved in there.",
        "unitrain: SIGTERM waits for the end of a round, which is saved whole or not at all. It began 7 s ago. A "
        "second signal ends the run at once, and the round is repeated when it is resumed.",
    ]


def test_what_a_feature_requests_waits_for_the_end_of_a_round() -> None:
    alone = Alone()
    alone.round("feature")
    assert alone.calls == ["end", signal.SIGTERM]


def test_a_signal_within_a_round_that_saves_leaves_one_checkpoint(tmp_path: Path) -> None:
    with unitrain.init(backend="single", precision="fp64") as strategy:
        checkpoint = strategy.checkpoint(tmp_path, state={})

        def round_with_a_signal() -> None:
            with checkpoint.round():
                checkpoint.save(best=True)
                strategy._job.stopping.request(SIGNAL, signal.SIGTERM)

        with pytest.raises(Stopped):
            round_with_a_signal()
        assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000000"]
        assert checkpoint.resume("best")


def test_a_signal_before_a_round_does_not_wait_for_it() -> None:
    alone = Alone()
    alone.stopping.request(SIGNAL, signal.SIGTERM)
    with pytest.raises(Stopped):
        alone.round()
    assert not alone.calls


def test_a_signal_within_a_round_that_fails_acts_at_the_next_boundary() -> None:
    alone = Alone()
    with pytest.raises(ValueError, match="of the script"):
        alone.round(SIGNAL, error=ValueError("an error of the script"))
    assert not alone.calls
    with pytest.raises(Stopped):
        alone.stopping.pass_boundary()


def test_a_checkpoint_that_could_not_be_written_ends_the_run_within_a_round() -> None:
    alone = Alone()
    alone.stopping.checkpoint = alone
    with pytest.raises(CheckpointError, match="the disk is full"):
        alone.round(RAISE_ERROR)
    assert not alone.calls
