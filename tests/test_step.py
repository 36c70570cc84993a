"""strategy.step and its halves on one process: the same as a plain loop, and every misuse answered."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from needs import GPU
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import TensorDataset

import unitrain
from unitrain import NonFiniteError, Stopped, Strategy, UsageError

SAMPLES = 22


def strategy_of(**settings: Any) -> Strategy:
    return unitrain.init(**{"backend": "single", "precision": "fp64", **settings})


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64),
        torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64),
    )


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def plain(
    global_batch: int,
    epochs: int = 2,
    make: Callable[[nn.Module], Optimizer] = sgd,
    before_step: Callable[[nn.Module], object] = lambda model: None,
) -> nn.Sequential:
    """Train without UniTrain on whole global batches."""
    model = model_of()
    optimizer = make(model)
    inputs, targets = data().tensors
    for _, start in itertools.product(range(epochs), range(0, SAMPLES, global_batch)):
        rows = slice(start, start + global_batch)
        optimizer.zero_grad()
        mse_loss(model(inputs[rows]), targets[rows]).backward()  # type: ignore[no-untyped-call]
        before_step(model)
        optimizer.step()
    return model


def trained(strategy: Strategy, global_batch: int, epochs: int = 2) -> nn.Module:
    model = model_of()
    prepared, optimizer = strategy.prepare(model, sgd(model))
    loader = strategy.dataloader(data(), global_batch_size=global_batch)
    for _ in loader.epochs(epochs):
        for inputs, targets in loader:
            strategy.step(mse_loss(prepared(inputs), targets), optimizer)
    return model


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(weights(one), weights(other), rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------- equal to a plain loop


def test_step_is_the_plain_loop() -> None:
    assert_equal(trained(strategy_of(), 5), plain(5))


@pytest.mark.parametrize("accumulate", [2, 3, 4])
def test_accumulation_gives_the_gradient_of_the_whole_window(accumulate: int) -> None:
    """Micro-batches are uneven, and the last window of an epoch (2 samples) has fewer of them."""
    assert_equal(trained(strategy_of(accumulate=accumulate), 5), plain(5))


def test_clipping_by_norm_is_torch_s_and_returns_the_norm() -> None:
    norms: list[Tensor] = []
    expected = plain(5, before_step=lambda m: norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.5)))
    strategy = strategy_of(clip_norm=0.5)
    model, optimizer = strategy.prepare(*(lambda m: (m, sgd(m)))(model_of()))
    loader = strategy.dataloader(data(), global_batch_size=5)
    returned = [
        strategy.step(mse_loss(model(inputs), targets), optimizer).grad_norm
        for _ in loader.epochs(2)
        for inputs, targets in loader
    ]
    assert_equal(model, expected)
    assert [float(norm) for norm in returned if norm is not None] == pytest.approx([float(norm) for norm in norms])
    assert max(map(float, norms)) > 0.5  # something was clipped


def test_clipping_by_value_is_torch_s() -> None:
    expected = plain(5, before_step=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.1))
    assert_equal(trained(strategy_of(clip_value=0.1), 5), expected)


def test_results_of_a_window() -> None:
    strategy = strategy_of(accumulate=2)
    model, optimizer = strategy.prepare(*(lambda m: (m, sgd(m)))(model_of()))
    loader = strategy.dataloader(data(), global_batch_size=20)
    results = [strategy.step(mse_loss(model(x), y), optimizer) for x, y in loader]
    # 10 + 10 samples, then a partial window of 2, which one micro-batch holds
    assert [(r.stepped, r.skipped, r.grad_norm) for r in results] == [
        (False, False, None),
        (True, False, None),
        (True, False, None),
    ]
    assert all(p.grad is None for p in model.parameters())


def test_scheduler_moves_only_with_the_optimizer() -> None:
    strategy = strategy_of(accumulate=3, on_nonfinite="skip")
    model = model_of()
    optimizer = sgd(model)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
    for factor in [1.0] * 6 + [math.nan] + [1.0] * 2:
        strategy.step(model(torch.ones(1, 4)).sum() * factor, optimizer, scheduler)
    assert scheduler.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3)


def test_without_a_loader_micro_batches_weigh_the_same() -> None:
    strategy = strategy_of(accumulate=2)
    model = model_of()
    expected = copy.deepcopy(model)
    optimizer = strategy.prepare(sgd(model))
    prepared = strategy.prepare(model)
    x = torch.randn(6, 4, dtype=torch.float64)
    for rows in (x[:2], x[2:]):
        strategy.step(prepared(rows).pow(2).mean(), optimizer)
    plain_optimizer = sgd(expected)
    (expected(x[:2]).pow(2).mean() / 2 + expected(x[2:]).pow(2).mean() / 2).backward()
    plain_optimizer.step()
    assert_equal(model, expected)


def test_a_window_ended_early_without_a_loader_is_the_mean_of_what_it_held() -> None:
    strategy = strategy_of(accumulate=4)
    model = model_of()
    expected = copy.deepcopy(model)
    model, optimizer = strategy.prepare(model, sgd(model))
    x = torch.randn(6, 4, dtype=torch.float64)
    strategy.step(model(x[:2]).pow(2).mean(), optimizer)
    strategy.backward(model(x[2:]).pow(2).mean(), optimizer, sync=True)
    assert strategy.update(optimizer).stepped
    plain_optimizer = sgd(expected)
    (expected(x[:2]).pow(2).mean() / 2 + expected(x[2:]).pow(2).mean() / 2).backward()
    plain_optimizer.step()
    assert_equal(model, expected)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_weight_makes_the_gradient_that_of_the_weighted_mean(as_tensor: bool) -> None:
    strategy = strategy_of(accumulate=2)
    model = model_of()
    expected = copy.deepcopy(model)
    model, optimizer = strategy.prepare(model, sgd(model))
    x = torch.randn(6, 4, dtype=torch.float64)
    for rows, tokens in ((x[:2], 3), (x[2:], 7)):
        weight = torch.tensor(tokens) if as_tensor else tokens
        strategy.step(model(rows).pow(2).mean(), optimizer, weight=weight)
    plain_optimizer = sgd(expected)
    (expected(x[:2]).pow(2).mean() * 0.3 + expected(x[2:]).pow(2).mean() * 0.7).backward()
    plain_optimizer.step()
    assert_equal(model, expected)


def test_weights_of_zero_leave_the_batch_out_whatever_its_loss() -> None:
    strategy = strategy_of(accumulate=2)
    model = model_of()
    expected = copy.deepcopy(model)
    model, optimizer = strategy.prepare(model, sgd(model))
    x = torch.randn(4, 4, dtype=torch.float64)
    strategy.step(model(x).pow(2).mean(), optimizer, weight=5)
    masked = (model(x).pow(2) * 0).sum() / torch.zeros(())  # the mean over no tokens: its gradient is NaN, too
    assert strategy.step(masked, optimizer, weight=0).stepped
    plain_optimizer = sgd(expected)
    expected(x).pow(2).mean().backward()
    plain_optimizer.step()
    assert_equal(model, expected)


# --------------------------------------------------------------------------------- several losses and optimizers


def test_two_losses_of_one_optimizer() -> None:
    strategy = strategy_of(accumulate=2)
    model = model_of()
    expected = copy.deepcopy(model)
    model, optimizer = strategy.prepare(model, sgd(model))
    plain_optimizer = sgd(expected)
    x = torch.randn(4, 4, dtype=torch.float64)
    for rows in (x[:2], x[2:]):
        out = model(rows)
        strategy.backward(out.pow(2).mean(), optimizer)
        strategy.backward(model(2 * rows).abs().mean(), optimizer)
        strategy.update(optimizer)
    for rows in (x[:2], x[2:]):
        ((expected(rows).pow(2).mean() + expected(2 * rows).abs().mean()) / 2).backward()
    plain_optimizer.step()
    assert_equal(model, expected)


def test_one_loss_of_several_optimizers_leaves_a_third_alone() -> None:
    strategy = strategy_of()
    one, two, third = model_of(1), model_of(2), model_of(3)
    optimizers = [sgd(m) for m in (one, two, third)]
    strategy.prepare(one, two, third, *optimizers)
    before = weights(third)
    x = torch.randn(3, 4, dtype=torch.float64)
    result = strategy.step((one(x) + two(x) + third(x)).sum(), optimizers[:2])
    assert result.stepped
    assert all(p.grad is None for p in third.parameters())
    strategy.step(third(x).sum(), optimizers[2])
    expected = model_of(3)
    expected(x).sum().backward()
    sgd(expected).step()
    assert_equal(third, expected)
    assert not torch.equal(weights(third), before)


def test_optimizer_met_first_in_step_gets_no_gradient_of_an_earlier_loss() -> None:
    """The generator's optimizer, never prepared, must not keep what the discriminator's backward left."""
    strategy = strategy_of()
    one, two = model_of(1), model_of(2)
    strategy.prepare(one, two)
    x = torch.randn(3, 4, dtype=torch.float64)
    strategy.step((one(x) * two(x)).sum(), sgd(one))
    strategy.step(two(x).sum(), sgd(two))
    expected = model_of(2)
    expected(x).sum().backward()
    sgd(expected).step()
    assert_equal(two, expected)


def test_scheduler_of_several_optimizers_moves_once() -> None:
    strategy = strategy_of()
    one, two = model_of(1), model_of(2)
    optimizers = [sgd(one), sgd(two)]
    scheduler = StepLR(optimizers[0], 1)
    strategy.prepare(one, two, *optimizers, scheduler)
    x = torch.ones(1, 4, dtype=torch.float64)
    strategy.step((one(x) + two(x)).sum(), optimizers, scheduler)
    assert scheduler.last_epoch == 1


def test_parameter_groups_added_and_frozen_layers_freed_after_prepare() -> None:
    strategy = strategy_of()
    model = model_of()
    model[0].requires_grad_(False)
    expected = copy.deepcopy(model)
    prepared, optimizer = strategy.prepare(model, SGD(model[2].parameters(), lr=0.1))
    plain_optimizer = SGD(expected[2].parameters(), lr=0.1)
    x = torch.randn(3, 4, dtype=torch.float64)

    def both() -> None:
        strategy.step(prepared(x).pow(2).mean(), optimizer)
        plain_optimizer.zero_grad()
        expected(x).pow(2).mean().backward()
        plain_optimizer.step()

    both()
    for target, opt in ((model, optimizer), (expected, plain_optimizer)):
        opt.add_param_group({"params": list(target[0].parameters()), "lr": 0.05})
    both()
    for target in (model, expected):
        target[0].requires_grad_(True)
    both()
    both()
    assert_equal(model, expected)
    assert not torch.equal(model.get_parameter("0.weight"), model_of().get_parameter("0.weight"))


def test_unused_parameters_are_left_alone() -> None:
    strategy = strategy_of()
    model = model_of()
    model.unused = nn.Linear(3, 3).double()
    before = model.unused.weight.clone()
    prepared, optimizer = strategy.prepare(model, AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    for _ in range(3):
        strategy.step(prepared[0](torch.ones(2, 4, dtype=torch.float64)).sum(), optimizer)
    assert torch.equal(model.unused.weight, before)
    assert model.unused.weight not in optimizer.state


def test_sparse_gradients() -> None:
    strategy = strategy_of()
    model, expected = (nn.Embedding(10, 3, sparse=True, _weight=torch.ones(10, 3).double()) for _ in range(2))
    model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
    plain_optimizer = SGD(expected.parameters(), lr=0.1)
    rows = torch.tensor([1, 3, 3])
    strategy.step(model(rows).pow(2).sum(), optimizer)
    expected(rows).pow(2).sum().backward()
    plain_optimizer.step()
    assert_equal(model, expected)


# ------------------------------------------------------------------------------------------------------ not finite


def step_with(strategy: Strategy, factors: Sequence[float], **options: Any) -> tuple[nn.Module, list[Any]]:
    model, optimizer = strategy.prepare(*(lambda m: (m, sgd(m)))(model_of()))
    x = torch.ones(2, 4, dtype=torch.float64)
    return model, [strategy.step(model(x).sum() * factor, optimizer) for factor in factors]


def test_nonfinite_loss_stops_with_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Stopped) as stopped:
        step_with(strategy_of(), [1, 1, math.nan, 1])
    assert stopped.value.code == 3
    said = capsys.readouterr().out
    assert "stopped: not finite at step 3: the loss of rank 0; first bad parameter: 0.weight" in said
    assert "on_nonfinite" in said


def test_nonfinite_loss_raises() -> None:
    with pytest.raises(NonFiniteError, match=r"not finite at step 2: the loss of rank 0; first bad parameter: 0\.w"):
        step_with(strategy_of(on_nonfinite="raise"), [1, math.inf])


def test_skipped_step_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with strategy_of(on_nonfinite="skip") as strategy:
        model, results = step_with(strategy, [1, math.nan, -math.inf, 1])
    assert [(r.stepped, r.skipped) for r in results] == [(True, False), (False, True), (False, True), (True, False)]
    expected, _ = step_with(strategy_of(), [1, 1])
    assert_equal(model, expected)
    assert capsys.readouterr().out.count("The step was skipped on all ranks.") == 2


@pytest.mark.parametrize("settings", [{}, {"clip_value": 0.1}, {"clip_norm": 0.1}, {"accumulate": 2}])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nonfinite_gradient_of_a_finite_loss_is_caught(settings: dict[str, Any], bad: float) -> None:
    """An infinite gradient must not pass for a large one that clipping has tamed."""
    strategy = strategy_of(on_nonfinite="raise", **settings)
    model, optimizer = strategy.prepare(*(lambda m: (m, sgd(m)))(model_of()))
    before = weights(model)
    model.get_parameter("2.bias").register_hook(lambda g: torch.full_like(g, bad))  # type: ignore[no-untyped-call]
    x = torch.ones(2, 4, dtype=torch.float64)
    said = r"a gradient of rank 0 \(every rank's loss was finite\); first bad parameter: 2.bias"
    with pytest.raises(NonFiniteError, match=said):  # noqa: PT012
        for _ in range(2 if settings.get("accumulate") else 1):
            strategy.step(model(x).sum(), optimizer)
    assert torch.equal(weights(model), before)


def test_a_norm_that_overflows_is_not_a_gradient_that_does() -> None:
    """The norm speaks for the gradients only where it is finite."""
    strategy = strategy_of(precision="fp32", clip_norm=1.0, on_nonfinite="raise")
    parameter = nn.Parameter(torch.ones(2))
    model = nn.Module()
    model.register_parameter("parameter", parameter)
    model, optimizer = strategy.prepare(model, SGD([parameter], lr=0.1))
    result = strategy.step(parameter.sum() * 1e30, optimizer)
    assert result.stepped
    assert result.grad_norm is not None
    assert math.isinf(result.grad_norm)
    assert parameter.isfinite().all()


# On a GPU the optimizer's own kernels leave the weights alone, before the host knows. Fused ones on a CPU do so too.
ON_DEVICE = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])]


def on_device(device: str, make: Callable[..., Optimizer], **settings: Any) -> tuple[Strategy, nn.Module, Optimizer]:
    strategy = unitrain.init(backend="single", precision="fp64", device=device, **settings)
    strategy.training_step._on_host = False  # as on a GPU
    strategy.training_step._guarded_step._may_flag = True
    model = model_of()
    prepared, optimizer = strategy.prepare(model, make(model.parameters(), lr=0.1, weight_decay=0.01, fused=True))
    return strategy, prepared, optimizer


def fused_sgd(parameters: Any, **options: Any) -> SGD:
    return SGD(parameters, momentum=0.9, **options)


@pytest.mark.parametrize("device", ON_DEVICE)
@pytest.mark.parametrize("make", [fused_sgd, SGD, AdamW])
def test_a_step_given_up_on_the_device_leaves_no_trace(device: str, make: Callable[..., Optimizer]) -> None:
    ends = []
    for factors in ([1, math.nan, 2, -math.inf, 1], [1, 2, 1], [math.nan, 1, 2, 1]):
        strategy, model, optimizer = on_device(device, make, on_nonfinite="skip", clip_norm=0.5)
        hook = Mock(return_value=None)
        optimizer.register_step_pre_hook(hook)
        x = torch.ones(2, 4, dtype=torch.float64, device=device)
        results = [strategy.step(model(x).sum() * factor, optimizer) for factor in factors]
        assert hook.call_count == len(factors), "no step waits for the host"
        assert [result.stepped for result in results] == [math.isfinite(factor) for factor in factors]
        assert [result.grad_norm is None for result in results] == [not result.stepped for result in results]
        state = [value for its in optimizer.state.values() for value in its.values()]
        ends.append(torch.cat([weights(model), *(value.reshape(-1).double() for value in state)]))
        strategy.close()
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[2], ends[1])


@pytest.mark.parametrize("device", ON_DEVICE)
@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}])
def test_a_gradient_found_on_the_device_is_named(device: str, settings: dict[str, Any]) -> None:
    strategy, model, optimizer = on_device(device, fused_sgd, on_nonfinite="raise", **settings)
    x = torch.ones(2, 4, dtype=torch.float64, device=device)
    strategy.step(model(x).sum(), optimizer)
    before = weights(model)
    model[2].bias.register_hook(lambda g: torch.full_like(g, math.nan))  # type: ignore[index]
    with pytest.raises(
        NonFiniteError, match=r"step 2: a gradient of rank 0 \(every rank's loss was finite\); .*parameter: 2.b"
    ):
        strategy.step(model(x).sum(), optimizer)
    assert torch.equal(weights(model), before)


def test_a_sparse_gradient_that_is_not_finite_is_named() -> None:
    strategy = strategy_of(on_nonfinite="raise")
    model = nn.Embedding(5, 3, sparse=True)
    model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
    model.get_parameter("weight").register_hook(lambda g: g * math.inf)  # type: ignore[no-untyped-call]
    with pytest.raises(NonFiniteError, match="first bad parameter: weight"):
        strategy.step(model(torch.tensor([1, 2])).sum(), optimizer)


def test_nonfinite_loss_in_the_midst_of_a_window_gives_up_the_window() -> None:
    with strategy_of(accumulate=3, on_nonfinite="skip") as strategy:
        model, results = step_with(strategy, [1, math.nan, 1, 1, 1, 1])
    assert [r.skipped for r in results] == [False, False, True, False, False, False]
    assert [r.stepped for r in results] == [False, False, False, False, False, True]
    expected, _ = step_with(strategy_of(), [1])
    assert_equal(model, expected)


def test_nonfinite_loss_of_one_optimizer_does_not_skip_another() -> None:
    strategy = strategy_of(on_nonfinite="skip")
    one, two = model_of(1), model_of(2)
    first, second = sgd(one), sgd(two)
    strategy.prepare(one, two, first, second)
    x = torch.ones(1, 4, dtype=torch.float64)
    strategy.backward(one(x).sum(), first)
    strategy.backward(two(x).sum() * math.nan, second)
    assert strategy.update(first).stepped
    assert strategy.update(second).skipped


def test_raised_nonfinite_step_leaves_nothing_for_the_next() -> None:
    strategy = strategy_of(on_nonfinite="raise")
    one, two = model_of(1), model_of(2)
    optimizers = [sgd(one), sgd(two)]
    strategy.prepare(one, two, *optimizers)
    x = torch.ones(1, 4, dtype=torch.float64)
    with pytest.raises(NonFiniteError):
        strategy.step((one(x) + two(x)).sum() * math.nan, optimizers)
    assert strategy.step((one(x) + two(x)).sum(), optimizers).stepped
    expected = model_of(2)
    expected(x).sum().backward()
    sgd(expected).step()
    assert_equal(two, expected)


# ------------------------------------------------------------------------------------------------------------ fp16


def test_fp16_overflow_halves_the_scale_and_skips() -> None:
    strategy = unitrain.init(backend="single", precision="fp16")
    model = model_of().float()
    model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
    x = torch.ones(2, 4)
    before = weights(model)
    scaler = strategy._precision.scaler
    assert scaler is not None
    assert strategy.step(model(x).float().mean() * 1e35, optimizer).skipped
    assert torch.equal(weights(model), before)
    assert scaler.get_scale() == 2**15
    assert strategy.step(model(x).float().mean(), optimizer).stepped


@pytest.mark.parametrize("joint", [True, False])
def test_fp16_scale_changes_between_windows_only(joint: bool) -> None:
    """Gradients that wait for their update were made with the scale of before."""
    strategy = unitrain.init(backend="single", precision="fp16")
    one, two = model_of(1).float(), model_of(2).float()
    first, second = SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.1)
    strategy.prepare(one, two, first, second)
    x = torch.ones(1, 4)
    bad, good = one(x).float().mean() * 1e35, two(x).float().mean()
    if joint:
        strategy.backward(bad + good)
    else:
        strategy.backward(bad, first)
        strategy.backward(good, second)
    assert strategy.update(first).skipped
    assert strategy.update(second).stepped
    expected = model_of(2).float()
    with torch.autocast("cpu", torch.float16):
        expected(x).float().mean().backward()
    SGD(expected.parameters(), lr=0.1).step()
    torch.testing.assert_close(weights(two), weights(expected), rtol=1e-3, atol=1e-3)


def test_fp16_gradients_are_clipped_unscaled() -> None:
    strategy = unitrain.init(backend="single", precision="fp16", clip_norm=1e-3)
    model = model_of().float()
    before = weights(model)
    model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=1.0))
    result = strategy.step(model(torch.ones(2, 4)).float().mean(), optimizer)
    assert result.grad_norm is not None
    assert 0.1 < result.grad_norm < 100
    assert (weights(model) - before).norm() == pytest.approx(1e-3, rel=1e-2)


def test_nan_at_the_smallest_scale_is_not_an_overflow() -> None:
    strategy = unitrain.init(backend="single", precision="fp16")
    model = model_of().float()
    model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(Stopped):  # noqa: PT012
        for _ in range(50):
            strategy.step(model(torch.ones(1, 4)).sum() * math.nan, optimizer)


# ----------------------------------------------------------------------------------------------------------- misuse


@pytest.fixture
def ready() -> tuple[Strategy, nn.Module, Optimizer]:
    strategy = strategy_of(accumulate=2)
    model = model_of()
    prepared, optimizer = strategy.prepare(model, sgd(model))
    return strategy, prepared, optimizer


Ready = tuple[Strategy, nn.Module, Optimizer]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda out: out, r"one number, but this has shape \(2, 2\)"),
        (lambda out: out.sum().item(), "float"),
        (lambda out: out.sum().detach(), "no gradient"),
    ],
)
def test_loss_must_be_a_scalar_with_a_gradient(ready: Ready, make: Callable[[Tensor], Any], message: str) -> None:
    strategy, model, optimizer = ready
    out = model(torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(UsageError, match=message):
        strategy.step(make(out), optimizer)


def test_loss_of_shape_1_is_a_scalar(ready: Ready) -> None:
    strategy, model, optimizer = ready
    strategy.step(model(torch.ones(2, 4, dtype=torch.float64)).sum().reshape(1), optimizer)


def test_update_needs_a_backward(ready: Ready) -> None:
    strategy, _, optimizer = ready
    with pytest.raises(UsageError, match=r"needs a backward\(\)"):
        strategy.update(optimizer)


def test_step_needs_an_optimizer(ready: Ready) -> None:
    strategy, model, _ = ready
    with pytest.raises(UsageError, match="needs an optimizer"):
        strategy.step(model(torch.ones(2, 4)).sum(), [])
    with pytest.raises(UsageError, match=r"needs an optimizer of torch, .*, not Sequential"):
        strategy.step(model(torch.ones(2, 4)).sum(), model)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="take optimizers of torch, not str"):
        strategy.step(model(torch.ones(2, 4)).sum(), ["SGD"])  # type: ignore[list-item]


def test_a_backward_of_the_user_s_is_one_too_many(ready: Ready) -> None:
    strategy, model, optimizer = ready
    loss = model(torch.ones(2, 4)).pow(2).sum()
    loss.backward()
    with pytest.raises(UsageError, match=r"step\(\) does one itself"):
        strategy.step(loss, optimizer)


def test_backward_without_any_optimizer() -> None:
    strategy = strategy_of()
    with pytest.raises(UsageError, match=r"prepare\(\)"):
        strategy.backward(torch.ones((), requires_grad=True))


def test_weights_of_a_window_are_all_or_none(ready: Ready) -> None:
    strategy, model, optimizer = ready
    strategy.step(model(torch.ones(2, 4)).sum(), optimizer, weight=3)
    with pytest.raises(UsageError, match="weight="):
        strategy.step(model(torch.ones(2, 4)).sum(), optimizer)


def test_one_micro_batch_is_stepped_once(ready: Ready) -> None:
    strategy, model, optimizer = ready
    for inputs, targets in strategy.dataloader(data(), global_batch_size=10):
        strategy.step(mse_loss(model(inputs), targets), optimizer)
        with pytest.raises(UsageError, match="twice for one micro-batch"):
            strategy.step(mse_loss(model(inputs), targets), optimizer)
        break


@pytest.mark.parametrize("left_out", [0, 1, 3])
def test_a_micro_batch_that_was_left_out_is_noticed(ready: Ready, left_out: int) -> None:
    strategy, model, optimizer = ready
    with pytest.raises(UsageError, match="never given to step"):  # noqa: PT012
        for i, (inputs, targets) in enumerate(strategy.dataloader(data(), global_batch_size=6)):
            if i != left_out:
                strategy.step(mse_loss(model(inputs), targets), optimizer)


def test_an_epoch_broken_off_in_a_window_leaves_nothing_for_the_next(ready: Ready) -> None:
    strategy, model, optimizer = ready
    expected = copy.deepcopy(model)
    loader = strategy.dataloader(data(), global_batch_size=10)
    for _ in range(2):
        for inputs, targets in loader:
            strategy.step(mse_loss(model(inputs), targets), optimizer)
            break
    before = weights(model)
    for i, (inputs, targets) in enumerate(loader):
        strategy.step(mse_loss(model(inputs), targets), optimizer)
        if i == 1:
            break
    assert not torch.equal(weights(model), before)
    inputs, targets = data().tensors
    plain_optimizer = sgd(expected)
    mse_loss(expected(inputs[:10]), targets[:10]).backward()  # type: ignore[no-untyped-call]
    plain_optimizer.step()
    assert_equal(model, expected)


def test_a_loader_s_window_can_not_be_ended_early(ready: Ready) -> None:
    strategy, model, optimizer = ready
    for inputs, targets in strategy.dataloader(data(), global_batch_size=10):
        with pytest.raises(UsageError, match="sync=True"):
            strategy.backward(mse_loss(model(inputs), targets), optimizer, sync=True)
        break


def test_lbfgs_is_refused() -> None:
    model = model_of()
    with pytest.raises(UsageError, match="LBFGS"):
        strategy_of().prepare(model, torch.optim.LBFGS(model.parameters()))


def test_adam_state_loaded_before_prepare_is_kept() -> None:
    torch.manual_seed(0)
    reference = model_of()
    reference_optimizer = Adam(reference.parameters(), lr=0.1)
    reference(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    reference_optimizer.step()
    model = copy.deepcopy(reference)
    optimizer = Adam(model.parameters(), lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(reference_optimizer.state_dict()))
    strategy = strategy_of()
    prepared, returned = strategy.prepare(model, optimizer)
    assert returned is optimizer
    strategy.step(prepared(torch.ones(1, 4)).sum(), optimizer)
    reference_optimizer.zero_grad()
    reference(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    reference_optimizer.step()
    assert_equal(model, reference)
