"""Duties of what the core makes of any backend, tested with the backends of this repository.

Evaluation, output that rank 0 writes, values that are not finite, optimizers, models that differ. They are run as those
of ``unitrain.testing``, which a backend of others must fulfil.
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from core_steps import clip_by_hand
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adafactor, Muon, Optimizer
from torch.utils.data import DataLoader

from unitrain import NonFiniteError, Stopped, Strategy, StrategyConfig, UsageError
from unitrain.testing.duties import DUTIES
from unitrain.testing.duty import Duty, duty, registered
from unitrain.testing.models import (
    EXACT,
    Net,
    Twins,
    assert_bit_equal_on_all_ranks,
    flat,
    samples,
    sgd,
    step_by_hand,
    whole,
)
from unitrain.testing.worlds import World


def train_plainly(model: nn.Module, optimizer: Optimizer, *, global_batch_size: int, epochs: int = 1) -> None:
    """Train a model in a plain loop over all samples."""
    for _ in range(epochs):
        for inputs, targets in DataLoader(samples(), batch_size=global_batch_size):
            step_by_hand(mse_loss(model(inputs), targets), optimizer)


# ----------------------------------------------------------------------------------------------------------- evaluation


@duty()
def evaluation_of_batch_norm(world: World) -> None:
    """All ranks evaluate with the mean of their running statistics, and the modes of layers are restored."""
    with world.open() as strategy:
        model = Net(norm=True)
        model.first.eval()
        prepared, _ = strategy.prepare(model, sgd(model))
        assert isinstance(model.norm, nn.BatchNorm1d)
        rows = torch.full((2, 4), float(strategy.rank), dtype=torch.float64) + torch.eye(2, 4)
        prepared(rows.to(strategy.device))
        means = strategy.communicator.all_gather(model.norm.running_mean)  # type: ignore[arg-type]
        with contextlib.suppress(ZeroDivisionError), strategy.evaluation(prepared):
            assert not prepared.training
            assert not torch.is_grad_enabled()
            torch.testing.assert_close(model.norm.running_mean, means.mean(0))
            raise ZeroDivisionError
        assert [m.training for m in (model, model.first, model.norm, model.last)] == [True, False, True, True]
        assert torch.is_grad_enabled()


@duty()
def evaluation_of_uneven_batches(world: World) -> None:
    """Trained weights are evaluated, each sample counts once, and ranks without samples keep no other waiting."""
    with world.open(timeout_s=10) as strategy:
        twins = Twins(strategy)
        twins.train()
        prepared, expected = twins.prepared, twins.expected
        data = samples(2 * strategy.world_size + 1)
        test = strategy.dataloader(data, batch_size=1)
        error, gathered = strategy.meter(), []
        with strategy.evaluation(prepared):
            for inputs, targets in test:
                error.add(mean=mse_loss(prepared(inputs), targets), count=len(inputs))
            for inputs, _ in test:
                gathered.append(strategy.gather(prepared(inputs)))
            inputs, targets = data.tensors
            wanted = expected(inputs)
        torch.testing.assert_close(error.value(), float(mse_loss(wanted, targets)), rtol=0, atol=EXACT)
        assert error.count() == len(data)
        torch.testing.assert_close(torch.cat(gathered).cpu(), wanted, rtol=0, atol=EXACT)


# ---------------------------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def shared_folder(strategy: Strategy) -> Iterator[Path]:
    """Yield a folder that all ranks of this host share."""
    with tempfile.TemporaryDirectory() as mine:
        yield Path(strategy.communicator.broadcast_object(mine))
        strategy.barrier()


@duty()
def rank_0_goes_first(world: World) -> None:
    """Rank 0 leaves main_first() before the others enter it."""
    with world.open() as strategy, shared_folder(strategy) as folder, strategy.main_first():
        assert (folder / "marker").exists() != strategy.is_main
        if strategy.is_main:
            time.sleep(0.05)  # enough for the others to enter, if they could
            (folder / "marker").touch()


@duty()
def saves_and_loads(world: World) -> None:
    """save() writes one complete file without the keys of a wrapper, and load() returns its contents on every rank."""
    with world.open() as strategy, shared_folder(strategy) as folder:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        keys = list(model.state_dict())
        prepared, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
        strategy.step(prepared(torch.ones(4, 3, device=strategy.device)).sum(), optimizer)
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
        assert list(loaded["model"]) == keys
        assert loaded["model"]["1.running_mean"].tolist() == [(strategy.world_size - 1) / 2] * 3
        assert torch.equal(loaded["model"]["0.weight"], whole(model.get_parameter("0.weight")).cpu())
        assert loaded["optimizer"]["state"][0]["momentum_buffer"].shape == (3, 3)
        assert (loaded["list"], loaded["rank"]) == ([1, "two", None], 0)


# ----------------------------------------------------------------------------------------------------------- not finite


_POISONS = ("loss", "labels", "gradient", "backward")


def _poisoned(out: Tensor, poison: str) -> Tensor:
    """Return a loss: finite, NaN, or NaN with gradients of 0, as if every label is ignored."""
    if poison == "loss":
        return out.sum() * math.nan
    labels = torch.full((len(out),), -100 if poison == "labels" else 1, device=out.device)
    return nn.functional.cross_entropy(out, labels)


class _Poisoned(Net):
    """A model that can get infinite gradients, in its last bias only or in all layers."""

    poison = ""

    def __init__(self) -> None:
        super().__init__()
        self.last.bias.register_hook(self._spoil)  # type: ignore[no-untyped-call]

    def _spoil(self, gradient: Tensor) -> Tensor:
        return gradient * math.inf if self.poison == "gradient" else gradient

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.poison == "backward":
            out.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
        return out


@duty(each={policy: policy for policy in ("stop", "skip", "raise")})
def not_finite(world: World, policy: Literal["stop", "skip", "raise"]) -> None:
    """If the last rank's values are not finite at step 3, all ranks apply on_nonfinite, and weights stay finite."""
    for poison in _POISONS:
        for debug in (False, True) if poison == "gradient" else (False,):
            with world.open(on_nonfinite=policy, debug=debug) as strategy:
                _meet(strategy, policy, poison)


def _whose(strategy: Strategy, poison: str, bad_rank: int) -> str:
    """Return what the message must say."""
    if strategy.device.type != "cpu":  # which rank and parameter it was is known if the host looks at them
        return f"the loss of rank {bad_rank}" if poison in ("loss", "labels") else "a gradient"
    if poison in ("loss", "labels"):
        return f"the loss of rank {bad_rank}; first affected parameter: first.weight."
    # If only the parameter's own gradient is affected, it is checked after it was averaged, except with debug.
    known = poison == "backward" or strategy.config.debug or strategy.world_size == 1
    first = "first.weight" if poison == "backward" else "last.bias"
    return (
        f"a gradient{f' of rank {bad_rank}' if known else ''} (the losses of all ranks were finite); "
        f"first affected parameter: {first}."
    )


def _meet(strategy: Strategy, policy: str, poison: str) -> None:
    model = _Poisoned()
    prepared, optimizer = strategy.prepare(model, sgd(model))
    bad_rank = strategy.world_size - 1
    printed = io.StringIO()
    steps: list[bool] = []
    ended: BaseException | None = None
    for step in range(1, 6):
        before = flat(model)
        model.poison = poison if step == 3 and strategy.rank == bad_rank else ""
        inputs = torch.full((2, 4), step, dtype=torch.float64, device=strategy.device)
        loss = _poisoned(prepared(inputs), model.poison)
        try:
            with contextlib.redirect_stdout(printed):
                steps.append(strategy.step(loss, optimizer).stepped)
        except (Stopped, NonFiniteError) as error:
            ended = error
            assert torch.equal(flat(model), before), poison
            break
        assert flat(model).isfinite().all(), poison
        assert torch.equal(flat(model), before) != steps[-1], poison
    if policy == "skip":
        assert ended is None, poison
        assert steps == [True, True, False, True, True], poison
    else:
        assert steps == [True, True], poison
        assert type(ended) is (Stopped if policy == "stop" else NonFiniteError), poison
        assert not isinstance(ended, Stopped) or ended.code == 3
    said = str(ended) if policy == "raise" else printed.getvalue()
    if policy == "raise" or strategy.is_main:
        assert f"not finite at step 3: {_whose(strategy, poison, bad_rank)}" in said
    else:
        assert said == ""
    assert_bit_equal_on_all_ranks(strategy, model)


# ----------------------------------------------------------------------------------------------------------- optimizers


@duty(each={"accumulate=1": 1, "accumulate=2": 2})
def losses_with_separate_weights(world: World, accumulate: int) -> None:
    """Several losses have separate weights, which are exact over ranks and micro-batches, and may be 0 on a rank."""
    with world.open(accumulate=accumulate, clip_norm=1.0, on_nonfinite="raise") as strategy:
        twins = Twins(strategy)
        clip_by_hand(twins.by_hand, 1.0)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            chosen = torch.rand(accumulate, 2, 2 * strategy.world_size, generator=generator) < 0.7
            chosen[0, 1, :2] = False  # rank 0 has none of the second: its mean is NaN
            sums: list[Any] = [0.0, 0.0]
            for number, masks in enumerate(chosen, 1):
                out, own = twins.prepared(number * twins.rows).pow(2).sum(1), masks[:, twins.mine]
                losses = {name: out[mask].sum() / mask.sum() for name, mask in zip("ab", own, strict=True)}
                counts = {name: mask.sum() for name, mask in zip("ab", own, strict=True)}
                assert strategy.step(losses, twins.optimizer, weight=counts).stepped == (number == accumulate)
                by_hand = twins.expected(number * twins.inputs).pow(2).sum(1)
                sums = [total + by_hand[mask].sum() for total, mask in zip(sums, masks, strict=True)]
            totals = chosen.sum((0, 2)).clamp(min=1)
            step_by_hand(sums[0] / totals[0] + sums[1] / totals[1], twins.by_hand)
        twins.assert_same()


@duty()
def optimizers_of_one_model(world: World) -> None:
    """Two optimizers of one model are both stepped for every loss, in any order."""
    with world.open() as strategy:
        twins = Twins(strategy)
        optimizers = [strategy.prepare(sgd(layer)) for layer in (twins.model.first, twins.model.last)]
        by_hand = [sgd(layer) for layer in (twins.expected.first, twins.expected.last)]
        for turn in (1, -1, 1):
            strategy.step(twins.loss(), optimizers[::turn])
            step_by_hand(twins.loss_by_hand(), *by_hand[::turn])
        twins.assert_same()


def _muon(model: Net) -> list[Optimizer]:
    layers = (model.first, model.last)
    return [Muon([layer.weight for layer in layers]), Adafactor([layer.bias for layer in layers])]


@duty(
    # Features are folders that can be deleted: without this one, there is no such setting.
    needs=lambda world: world.processes > 1 and not world.shards and "shard_optimizer" in StrategyConfig.model_fields
)
def sharded_optimizers(world: World) -> None:
    """With shard_optimizer, each rank has a part of the state, also of an optimizer that uses whole parameters."""
    with world.open(shard_optimizer=True, clip_norm=0.5) as strategy:
        twins = Twins(strategy)
        optimizers, by_hand = [strategy.prepare(one) for one in _muon(twins.model)], _muon(twins.expected)
        for one in by_hand:
            clip_by_hand(one, 0.5)
        for _ in range(5):
            strategy.step(twins.loss(), optimizers)
            step_by_hand(twins.loss_by_hand(), *by_hand)
        torch.testing.assert_close(flat(twins.model), flat(twins.expected), rtol=0, atol=1e-9)
        assert_bit_equal_on_all_ranks(strategy, twins.model)
        own = sum(len(one.state) for one in optimizers)
        assert own < 4
        assert strategy.all_reduce(torch.tensor(own)) == 4


@duty()
def steps_by_hand(world: World) -> None:
    """An optimizer that the script steps itself is an error if the ranks' weights would diverge."""
    with world.open() as strategy:
        model, other = Net(1), Net(2)
        prepared, optimizer = strategy.prepare(model, sgd(model))
        inputs, targets = samples(2).tensors
        before = flat(model)
        on_device = prepared(inputs.to(strategy.device) * (strategy.rank + 1))
        mse_loss(on_device, targets.to(strategy.device)).backward()  # type: ignore[no-untyped-call]
        if strategy.world_size == 1:
            optimizer.step()
            assert not torch.equal(flat(model), before)
        else:
            said = r"optimizer\.step\(\) was called for a prepared model.*call these instead of loss\.backward\(\)"
            for one in (optimizer, sgd(model)):
                with pytest.raises(UsageError, match=said):
                    one.step()
            assert torch.equal(flat(model), before)
        alone = sgd(other)  # a rank may train a model of its own
        step_by_hand(other(inputs).sum(), alone)


CORE_DUTIES: dict[str, Duty] = {name: one for name, one in registered().items() if name not in DUTIES}
