"""``average``, ``mean`` and ``shard_like``: what a script computes itself is the same as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from needs import FSDP, HOROVOD
from plain_loop import strategy_of
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.functional import softplus
from torch.optim import SGD

import unitrain
from unitrain import UsageError

BATCH, LR = 5, 0.1
Average = Callable[..., Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def samples() -> Tensor:
    """Return 11 samples: of batches of 5, two ranks have 3 and 2; of the last one, 1 and none."""
    return torch.rand(11, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def pinn(model: nn.Module, x: Tensor, average: Average) -> Any:
    """Return the gradient of the residual of u'' = u."""
    x = x.detach().requires_grad_()
    u = model(x)[:, :1]
    [du] = grad(u.sum(), x, create_graph=True)
    [ddu] = grad(du.sum(), x, create_graph=True)
    loss = (ddu.sum(1, keepdim=True) - u).square().mean()
    return average(grad(loss, [*model.parameters()], allow_unused=True), weight=len(x))


def loss_of_means(model: nn.Module, x: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Return this rank's mean of a function of global means, plus a function of one."""
    scores = model(x)
    center = mean(scores.mean(0))
    loss: Tensor = softplus(scores[:, 0] - center[1]).mean() + (scores - center).square().mean() + center[0].exp()
    return loss


@torch.no_grad()
def descend(model: nn.Module, gradients: Iterable[Tensor | None]) -> None:
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        if gradient is not None:
            p.sub_(gradient, alpha=LR)


def own_loss(model: nn.Module, x: Tensor, average: Average, mean: Callable[[Tensor], Tensor]) -> Any:
    """Return the gradient of the loss above."""
    return average(grad(loss_of_means(model, x, mean), [*model.parameters()]))


def train(
    model: nn.Module, batches: Callable[[], Iterable[Tensor]], average: Average, mean: Callable[[Tensor], Tensor]
) -> Tensor:
    """Make steps with the gradients of each trainer. Return the weights after each."""
    weights = []
    for trainer in (pinn, partial(own_loss, mean=mean)):
        for x in batches():
            descend(model, trainer(model, x, average))
            weights.append(flat(model.parameters()))
    return torch.stack(weights)


def plain_batches() -> list[Tensor]:
    return [*torch.split(samples(), BATCH)]


def in_a_world(backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights after each own step, the gradients of steps, and the weights at the end."""
    with unitrain.init(backend=backend, device="cpu", timeout_s=30, precision="fp64") as strategy:
        made = net()
        model, optimizer = strategy.prepare(made, SGD(made.parameters(), LR))
        loader = strategy.dataloader(samples(), global_batch_size=BATCH)
        weights = train(model, lambda: loader, strategy.average, strategy.mean)
        applied: list[Tensor] = []
        optimizer.register_step_pre_hook(
            lambda *_: applied.append(flat(p.grad for p in model.parameters() if p.grad is not None))
        )
        for x in loader:
            loss = loss_of_means(model, x, strategy.mean)
            gradients = strategy.average(grad(loss, [*model.parameters()], retain_graph=True))
            strategy.step(loss, optimizer)
            torch.testing.assert_close(flat(gradients), applied[-1], rtol=1e-9, atol=1e-12)
        with strategy.evaluation(model):
            means = [strategy.mean(model(x).mean(0)) for x in loader]
            torch.testing.assert_close(means, [model(x).mean(0) for x in plain_batches()], rtol=1e-9, atol=1e-12)
        return weights, torch.stack(applied), flat(model.parameters())


@pytest.mark.parametrize("backend", ["single", "ddp", pytest.param("horovod", marks=HOROVOD)])
def test_own_gradients_are_those_of_a_plain_loop(backend: str) -> None:
    model, applied = net(), []
    weights = train(model, plain_batches, lambda gradients, weight=None: gradients, lambda value: value)
    for x in plain_batches():
        gradients = grad(loss_of_means(model, x, lambda value: value), [*model.parameters()])
        applied.append(flat(gradients))
        descend(model, gradients)
    for result in [in_a_world(backend)] if backend == "single" else run_ranks(in_a_world, backend):
        for actual, expected in zip(result, (weights, torch.stack(applied), flat(model.parameters())), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@FSDP
@on_ranks()
def test_parts_of_whole_tensors_and_no_means_of_shards() -> None:
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30, precision="fp64") as strategy:
        model = strategy.prepare(net())
        for p in model.parameters():
            whole = strategy.communicator.broadcast(torch.randn(p.shape, dtype=p.dtype))
            assert torch.equal(strategy.full_tensor(strategy.shard_like(whole, p)), whole)
            with pytest.raises(UsageError, match=r"shape \[9\], but the whole parameter"):
                strategy.shard_like(torch.zeros(9), p)
        model(samples()).sum().backward()
        with pytest.raises(UsageError, match="entry 0 is a shard: backward has averaged it"):
            strategy.average([p.grad for p in model.parameters()])
        [whole] = strategy.average([torch.full((3,), float(strategy.rank))], weight=strategy.rank)
        assert whole.tolist() == [1.0, 1.0, 1.0]


@on_ranks()
def test_tensors_of_all_kinds_are_averaged() -> None:
    with unitrain.init(backend="ddp", device="cpu", timeout_s=30) as strategy:
        rank = strategy.rank
        gradients: dict[str, Any] = {
            "double": torch.full((2, 3), rank + 1.0, dtype=torch.float64).T,
            "half": torch.full((), 6e4, dtype=torch.float16),  # the sum of two overflows
            "zeros on one rank": torch.full((3,), 1.0 - rank, dtype=torch.bfloat16),
            "unused": None,
        }
        if rank:
            gradients = dict(reversed(gradients.items()))
        averaged = strategy.average(gradients, weight=torch.tensor(2 * rank + 1))
        assert list(averaged) == list(gradients)
        assert torch.equal(averaged["double"], torch.full((3, 2), 1.75, dtype=torch.float64))
        assert averaged["half"].item() == gradients["half"].item()
        assert averaged["half"].dtype == torch.float16
        assert averaged["zeros on one rank"].tolist() == [0.25] * 3
        assert averaged["zeros on one rank"].dtype == torch.bfloat16
        assert averaged["unused"] is None
        assert strategy.average([]) == []
        without_samples = (torch.tensor([float("nan") if rank else 2.0]),)
        assert strategy.average(without_samples, weight=0 if rank else 3) == (torch.tensor([2.0]),)
        value = torch.tensor(float(rank), requires_grad=True)
        [slope] = grad(strategy.mean(value, count=rank).exp(), value, create_graph=True)
        assert grad(slope, value)[0].item() == pytest.approx(torch.e)


@on_ranks()
def test_what_has_no_mean_is_refused_on_all_ranks() -> None:
    with unitrain.init(backend="ddp", device="cpu", timeout_s=30) as strategy:
        rank, one = strategy.rank, torch.ones(2)
        refused: list[tuple[Any, Any, str]] = [
            ([one, torch.ones(2 + rank)], 1, r"entry 1 is float32 \[2\] on rank 0; float32 \[3\] on rank 1"),
            ({"a": one, "bc"[rank]: one}, 1, r"entry 'b' is float32 \[2\] on rank 0; missing on rank 1"),
            ([None if rank else one], 1, r"zeros for a None .* entry 0 is float32 \[2\] on rank 0; None on rank 1"),
            ([one.long() if rank else one], 1, "entry 0 is .* on rank 1"),
            ([one.long()], 1, "entry 0 is a torch.strided int64 tensor without a graph: pass its to_dense"),
            ([one.to_sparse()], 1, "entry 0 is a torch.sparse_coo float32 tensor without a graph"),
            ([one.requires_grad_() * 2], 1, "entry 0 is a torch.strided float32 tensor with a graph"),
            (one, 1, "a list, tuple or dict of tensors, not Tensor"),
            ([one], 0, "weights in average.* are 0.0 on rank 0, 1"),
            ([one], 1 - 2 * rank, "are 1.0 on rank 0; -1.0 on rank 1"),
            ([one], float("nan") if rank else 1, "are 1.0 on rank 0; nan on rank 1"),
        ]
        for gradients, weight, message in refused:
            with pytest.raises(UsageError, match=message):
                strategy.average(gradients, weight)
        with pytest.raises(UsageError, match=r"the value with a gradient is .* on rank 0; missing on rank 1"):
            strategy.mean(one.detach() if rank else one)
        # 2 of 4 samples of a step are on this rank in one of them, and 2 or 1 of 3 in the other.
        loaders = [strategy.dataloader(samples(), global_batch_size=size) for size in (4, 3)]
        for _ in zip(*loaders, strict=False):
            with pytest.raises(UsageError, match=r"are nan on rank 0, 1.* several batches of loaders"):
                strategy.average([one.detach()])
            assert strategy.average([one.detach()], weight=1)[0].tolist() == [1.0, 1.0]
            break


def test_ranks_that_have_several_models_have_no_averages() -> None:
    strategy = strategy_of(local_sgd={"steps": 2})
    made = net()
    model, optimizer = strategy.prepare(made, SGD(made.parameters(), LR))
    strategy.step(model(samples()).sum(), optimizer)
    with pytest.raises(UsageError, match=r"average\(\)"):
        strategy.average([torch.ones(1)])
    assert strategy.mean(torch.ones(1)).item() == 1.0
    with pytest.raises(UsageError, match=r"mean\(\) of a value with a gradient"):
        strategy.mean(torch.ones(1, requires_grad=True))
    strategy.step(model(samples()).sum(), optimizer)  # ends the round
    assert strategy.average([torch.ones(1)]) == [torch.ones(1)]
