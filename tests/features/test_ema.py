"""An EMA is the one that is written by hand in one process, and the weights of training are never lost in a swap."""

from __future__ import annotations

import itertools
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from needs import HOROVOD
from plain_loop import SAMPLES, Ready, assert_equal, data, model_of, ready, sgd, strategy_of, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unitrain
from unitrain import Stopped, UsageError
from unitrain.features.ema import EMA

__all__ = ["ready"]  # the fixture
DECAY, BATCH, EPOCHS = 0.7, 5, 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()


def by_hand() -> tuple[dict[str, Tensor], Tensor]:
    """Train without UniTrain; return the average's state dict, and what a model with it returns in eval mode."""
    model = net()
    optimizer = sgd(model)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, targets = data().tensors
    for _, start in itertools.product(range(EPOCHS), range(0, SAMPLES, BATCH)):
        rows = slice(start, start + BATCH)
        optimizer.zero_grad()
        mse_loss(model(inputs[rows]), targets[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for name, value in model.state_dict().items():
            average[name] = DECAY * average[name] + (1 - DECAY) * value if value.is_floating_point() else value
    return average, loaded(average).eval()(inputs).detach()


def loaded(state: dict[str, Tensor]) -> nn.Sequential:
    model = net()
    model.load_state_dict(state)
    return model


class Run:
    """Trains with an EMA, and saves at the end of each epoch."""

    def __init__(self, folder: str | Path, batch: int = BATCH, **settings: Any) -> None:
        self.strategy = unitrain.init(precision="fp64", device="cpu", timeout_s=60, **settings)
        model = net()
        self.model, self.optimizer = self.strategy.prepare(model, sgd(model))
        self.ema = self.strategy.add(EMA(self.model, DECAY))
        self.loader = self.strategy.dataloader(data(), global_batch_size=batch)
        self.checkpoint = self.strategy.checkpoint(
            folder, model=self.model, optimizer=self.optimizer, ema=self.ema, loader=self.loader
        )

    def train(self, epochs: int) -> Run:
        for _ in self.loader.epochs(epochs):
            for inputs, targets in self.loader:
                self.strategy.step(mse_loss(self.model(inputs), targets), self.optimizer)
            self.checkpoint.save()
        return self

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.ema.state_dict().items()}


def train(folder: str, settings: dict[str, Any], epochs: int) -> tuple[bool, dict[str, Tensor], Tensor]:
    """Resume, train and evaluate with the average; return whether it was resumed, the average, and the results."""
    run = Run(folder, **settings)
    resumed = run.checkpoint.resume()
    run.train(epochs)
    with run.strategy.evaluation(run.ema):
        evaluated = run.model(data().tensors[0])
    run.strategy.check_in_sync(run.model)
    average = run.state()
    run.strategy.close()
    return resumed, average, evaluated


@pytest.mark.parametrize(
    ("backend", "worlds"),
    [
        ("single", (1, 1)),
        ("ddp", (2, 3)),
        pytest.param("horovod", (3, 2), marks=HOROVOD),
    ],
)
def test_it_is_the_one_written_by_hand_and_resumed_on_any_number_of_ranks(
    backend: str, worlds: tuple[int, int], tmp_path: Path
) -> None:
    """The last batch of an epoch has 2 samples: of 3 ranks, one has none."""
    settings = {"backend": backend, "sync_batchnorm": True}
    run_ranks(train, str(tmp_path), settings, 1, nprocs=worlds[0])
    for found in run_ranks(train, str(tmp_path), settings, EPOCHS, nprocs=worlds[1]):
        torch.testing.assert_close(found, (True, *by_hand()), rtol=1e-12, atol=1e-12)


def unsynchronised(folder: str) -> list[dict[str, Tensor]]:
    """Return a rank's average, that in the evaluation, and that which is saved; and the models' statistics."""
    run = Run(folder, 6, backend="ddp")
    run.train(1)
    own = run.state()
    with run.strategy.evaluation(run.ema):
        evaluated = {name: value.clone() for name, value in run.strategy.unwrap(run.model).state_dict().items()}
    run.checkpoint.save()
    run.strategy.save(run.ema, Path(folder) / "average.pt")
    saved = run.strategy.load(Path(folder) / "average.pt")
    run.strategy.close()
    return [own, evaluated, saved]


def test_statistics_that_differ_between_ranks_are_averaged_like_the_model_s(tmp_path: Path) -> None:
    ranks = run_ranks(unsynchronised, str(tmp_path), nprocs=2)
    (first, _, saved), (second, *_) = ranks
    assert torch.equal(first["1.running_mean"], second["1.running_mean"]), "they were averaged when they were saved"
    [in_checkpoint] = map(torch.load, tmp_path.glob("step-0000000004*/ema.pt"))
    for name, value in first.items():
        for other in (second, *ranks[0][1:], *ranks[1][1:], in_checkpoint):
            assert torch.equal(value, other[name]), name
    assert not torch.equal(weights(loaded(saved)), weights(net()))


def test_it_is_updated_once_for_each_optimizer_step_as_torch_s_is(ready: Ready) -> None:
    strategy, model, optimizer = ready  # accumulate is 2
    inputs, targets = data().tensors
    ema = strategy.add(EMA(model, DECAY))
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)  # weights that are loaded before the first step
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]
    reference.update_parameters(model)
    for step in range(6):
        before = [value.clone() for value in ema.state_dict().values()]
        result = strategy.step(mse_loss(model(inputs[step::6]), targets[step::6]), optimizer)
        assert result.stepped == step % 2
        if result.stepped:
            reference.update_parameters(model)
        else:
            assert all(map(torch.equal, before, ema.state_dict().values()))
        assert_equal(reference.module, strategy.export(ema))
    assert list(ema.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_it_begins_with_weights_that_were_written_past_autograd(tmp_path: Path, evaluates_first: bool) -> None:
    """To write to ``parameter.data`` does not change a tensor's version."""
    run = Run(tmp_path, backend="single")
    for parameter in run.model.parameters():
        parameter.data.fill_(0.25)
    if evaluates_first:
        with run.strategy.evaluation(run.ema):
            assert all((parameter == 0.25).all() for parameter in run.model.parameters())
    inputs, targets = data().tensors
    run.strategy.step(mse_loss(run.model(inputs), targets), run.optimizer)
    average = run.state()
    for name, weight in run.strategy.unwrap(run.model).named_parameters():
        torch.testing.assert_close(average[name], DECAY * 0.25 + (1 - DECAY) * weight.detach())
    run.strategy.close()


def test_it_is_not_updated_for_a_step_that_is_skipped() -> None:
    with strategy_of(on_nonfinite="skip") as strategy:
        model, optimizer = strategy.prepare(module := model_of(), sgd(module))
        ema = strategy.add(EMA(model, DECAY))
        assert strategy.step(model(torch.ones(1, 4)).sum(), optimizer).stepped
        before = weights(strategy.export(ema))
        assert strategy.step(model(torch.full((1, 4), torch.nan)).sum(), optimizer).skipped
        assert torch.equal(weights(strategy.export(ema)), before)


def test_it_follows_the_optimizers_of_its_model_only() -> None:
    with strategy_of() as strategy:
        generator, discriminator = strategy.prepare(model_of(), model_of(1))
        optimizers = [SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)]
        ema = strategy.add(EMA(generator, 0.5))
        before = weights(generator)
        for model, optimizer in ((discriminator, optimizers[1]), (generator, optimizers[0])):
            average = weights(strategy.export(ema))
            strategy.step(model(torch.ones(1, 4)).sum(), optimizer)
            assert torch.equal(weights(strategy.export(ema)), average) == (model is discriminator)
        torch.testing.assert_close(weights(strategy.export(ema)), (before + weights(generator)) / 2)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, backend="single").train(1)


def test_the_weights_are_swapped_and_back_also_after_an_exception(run: Run) -> None:
    trained, average = weights(run.model), weights(run.strategy.export(run.ema))
    assert not torch.equal(trained, average)
    for swapped, trains in ((run.ema.swapped(), True), (run.strategy.evaluation(run.ema), False)):
        with suppress(ZeroDivisionError), swapped:
            assert run.model.training == trains
            assert torch.equal(weights(run.model), average)
            assert torch.equal(weights(run.strategy.export(run.model)), average)
            _ = 1 / 0
        assert run.model.training
        assert torch.equal(weights(run.model), trained)
    assert torch.equal(weights(run.strategy.export(run.ema)), average)


def test_a_checkpoint_within_a_swap_has_the_weights_of_training(run: Run, tmp_path: Path) -> None:
    trained, average = weights(run.model), weights(run.strategy.export(run.ema))
    with run.strategy.evaluation(run.ema):
        folder = Path(run.checkpoint.save_now())
        assert torch.equal(weights(run.model), average)
    for name, expected in (("model", trained), ("ema", average)):
        assert torch.equal(weights(loaded(torch.load(folder / f"{name}.pt"))), expected)
    run.train(2)
    with run.ema.swapped():
        assert run.checkpoint.resume(folder)
        assert torch.equal(weights(run.model), average)
    assert torch.equal(weights(run.model), trained)
    assert torch.equal(weights(run.strategy.export(run.ema)), average)


def test_a_signal_in_an_evaluation_saves_the_weights_of_training(run: Run, tmp_path: Path) -> None:
    trained = weights(run.model)
    run.checkpoint.wait()
    run.checkpoint.discard()

    def evaluate() -> None:
        with run.strategy.evaluation(run.ema):
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in itertools.chain.from_iterable(itertools.repeat(run.loader, 10_000)):
                time.sleep(0.001)

    with pytest.raises(Stopped):
        evaluate()
    assert torch.equal(weights(run.model), trained)
    saved = torch.load(tmp_path / f"step-{run.strategy.global_step:010d}" / "model.pt")
    assert torch.equal(weights(loaded(saved)), trained)


def test_what_would_lose_weights_in_a_swap_is_refused(run: Run) -> None:
    second = run.strategy.add(EMA(run.model, 0.5))
    trained = weights(run.model)
    with run.ema.swapped():
        for other in (run.ema, second):
            with pytest.raises(UsageError, match=r"within swapped\(\): the model has averaged weights"):
                other.swapped().__enter__()
            for use in (other.state_dict, lambda ema=other: ema.load_state_dict({})):
                with pytest.raises(UsageError, match="save or load the model's"):
                    use()
        average = weights(run.model)
        with pytest.raises(UsageError, match=r"a step was made within ema\.swapped\(\)"):
            run.strategy.step(run.model(torch.ones(2, 4).double()).sum(), run.optimizer)
        assert torch.equal(weights(run.model), average)
    said = r"weights \(0\.weight\) were changed within ema\.swapped"
    with pytest.raises(UsageError, match=said), run.ema.swapped(), torch.no_grad():
        run.model.get_parameter("0.weight").zero_()
    assert torch.equal(weights(run.model), trained)


def test_a_weight_that_was_replaced_is_found(run: Run) -> None:
    run.model[0].weight = nn.Parameter(torch.zeros(8, 4).double())
    for use in (run.ema.state_dict, run.ema.swapped().__enter__, run.checkpoint.save_now):
        with pytest.raises(UsageError, match=r"0\.weight is not the tensor that the EMA averages"):
            use()


@pytest.mark.parametrize("backend", ["single", "ddp"])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_and_wrapped_models(backend: str, compiled_first: bool) -> None:
    torch.compiler.reset()
    with unitrain.init(backend=backend, device="cpu") as strategy:
        module = model_of().float()
        compiled: Any = torch.compile(module, backend="eager") if compiled_first else module
        model, optimizer = strategy.prepare(compiled, sgd(module))
        model = model if compiled_first else cast(Any, torch.compile(model, backend="eager"))
        ema = strategy.add(EMA(model, 0.5))
        inputs = torch.randn(3, 4)
        for _ in range(2):
            strategy.step(model(inputs).sum(), optimizer)
        assert list(ema.state_dict()) == list(module.state_dict())
        with strategy.evaluation(ema):
            averaged = model(inputs)
        torch.testing.assert_close(averaged, strategy.export(ema)(inputs))
        assert not torch.equal(averaged, model(inputs))


class Holed(nn.Linear):
    """Leaves a parameter out of its state dict."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        del state["bias"]
        return state


@pytest.mark.parametrize(
    ("model", "decay", "said"),
    [
        (nn.Linear(1, 1), 1.0, r"decay is 1\.0, but must be"),
        (nn.Linear(1, 1), float("nan"), "decay is nan"),
        (nn.Linear(1, 1).bfloat16(), 0.9, "weight is bfloat16, which is"),
        (Holed(1, 1), 0.9, r"state_dict\(\) lacks bias"),
    ],
)
def test_what_can_t_be_averaged_is_refused(model: nn.Module, decay: float, said: str) -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        with pytest.raises(UsageError, match="needs a prepared model, but weight belongs to none"):
            strategy.add(EMA(model, 0.9))
        with pytest.raises(UsageError, match=said):
            strategy.add(EMA(strategy.prepare(model), decay))


def test_a_buffer_that_is_infinite_stays_the_model_s(tmp_path: Path) -> None:
    """A mask of -inf is no number to average: its average would be NaN."""

    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("mask", torch.full((2,), -torch.inf))
            self.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
            self.register_parameter("indices", nn.Parameter(torch.arange(2), requires_grad=False))

    with unitrain.init(backend="single", device="cpu") as strategy:
        model, optimizer = strategy.prepare(module := Masked(), SGD(module.parameters(), lr=0.1))
        ema = strategy.add(EMA(model, 0.9))
        for _ in range(3):
            strategy.step(model(torch.ones(1, 2)).sum(), optimizer)
        state = ema.state_dict()
        assert torch.equal(state["mask"], torch.full((2,), -torch.inf))
        assert torch.equal(state["frozen"], torch.ones(2))
        assert torch.equal(state["indices"], torch.arange(2))
        strategy.save(ema, tmp_path / "average.pt")
        model.load_state_dict(strategy.load(tmp_path / "average.pt"))
        assert torch.equal(model.get_parameter("weight"), state["weight"])


def test_another_average_s_state_is_refused(run: Run) -> None:
    state = run.state()
    for broken in ({**state, "0.weight": torch.ones(1)}, {}):
        with pytest.raises(UsageError, match=r"has no 0\.weight of shape \(8, 4\)"):
            run.ema.load_state_dict(broken)
    assert all(map(torch.equal, state.values(), run.ema.state_dict().values()))
    run.ema.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert not weights(run.strategy.export(run.ema)).any()
