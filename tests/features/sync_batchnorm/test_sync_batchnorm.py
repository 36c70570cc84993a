"""Synchronised BatchNorm, compared with BatchNorm on the concatenated batch, in float64 to 1e-10."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_waits import GPU_0, Waits, communicator_on_gpu
from ranks import on_ranks, run_ranks
from torch import Tensor, nn

import unitrain
from unitrain import ConfigError, Strategy
from unitrain.data.loop import CurrentBatch
from unitrain.features.sync_batchnorm.layers import Synchronisation
from unitrain.features.sync_batchnorm.ops import LayerContext, gather_statistics

EXACT = 1e-10
CHANNELS = 3
KINDS: list[tuple[type[nn.Module], tuple[int, ...]]] = [
    (nn.BatchNorm1d, ()), (nn.BatchNorm1d, (6,)), (nn.BatchNorm2d, (4, 5)), (nn.BatchNorm3d, (2, 3, 2)),
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"momentum": 0.3, "eps": 0.1},
    {"affine": False},
    {"track_running_stats": False},
]
SHARES = [(3, 3), (5, 2), (4, 0), (0, 2), (1, 1), (1, 3, 2), (0, 4, 1)]


def _batch(rows: int, shape: tuple[int, ...], step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, CHANNELS, *shape, generator=generator, dtype=torch.float64)


def _layer(kind: type[nn.Module], options: dict[str, Any]) -> Any:
    layer: Any = kind(CHANNELS, **options)
    layer.double()
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, 1.5, -2.0]))
            layer.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    return layer


def _open(**settings: Any) -> Strategy:
    return unitrain.init(**{"precision": "fp64", "sync_batchnorm": True, "timeout_s": 30, **settings})


def _close_to(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=EXACT)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _synchronisation(strategy: Strategy) -> Synchronisation:
    [found] = (made for made in strategy._sockets.passes if isinstance(made, Synchronisation))
    return found


def _layers(strategy: Strategy, kind: type[nn.Module], options: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Return a synchronised layer, and a plain one."""
    synced, plain = _layer(kind, options or {}), _layer(kind, options or {})
    _synchronisation(strategy).apply(synced)
    return synced, plain


def _compare(
    strategy: Strategy, kind: type[nn.Module], shape: tuple[int, ...], options: dict[str, Any], shares: tuple[int, ...]
) -> None:
    """Run three steps on this rank's share, and on the whole batch by plain BatchNorm."""
    synced, plain = _layers(strategy, kind, options)
    assert isinstance(synced, kind)
    start = sum(shares[: strategy.rank])
    mine = slice(start, start + shares[strategy.rank])
    for step in range(3):
        whole: Any = (3 + _batch(sum(shares), shape, step)).requires_grad_()
        share: Any = whole.detach()[mine].requires_grad_()
        seed = _batch(sum(shares), shape, 10 + step)
        expected, output = plain(whole), synced(share)
        _close_to(output, expected[mine])
        expected.backward(seed)
        output.backward(seed[mine])
        _close_to(share.grad, whole.grad[mine])
        for ours, its in zip(synced.parameters(), plain.parameters(), strict=True):
            _close_to(strategy.all_reduce(_gradient(ours)), _gradient(its))  # a rank's part of the sum over all rows
            ours.grad = its.grad = None
        for (name, buffer), (_, other) in zip(synced.named_buffers(), plain.named_buffers(), strict=True):
            assert buffer.dtype == other.dtype, name
            _close_to(buffer, other)
    synced.eval()
    plain.eval()
    if plain.track_running_stats:
        _close_to(synced(whole[:2]), plain(whole[:2]))
    keys = list(synced.state_dict())
    _synchronisation(strategy).revert(synced)
    assert type(synced) is kind
    assert vars(synced).keys() == vars(plain).keys()
    assert list(synced.state_dict()) == keys == list(plain.state_dict())


def _compare_all(world_size: int) -> int:
    compared = 0
    with _open() as strategy:
        for (kind, shape), options, shares in itertools.product(KINDS, OPTIONS, SHARES):
            if len(shares) != world_size:
                continue
            _compare(strategy, kind, shape, options, shares)
            compared += 1
    return compared


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.all("more ranks"))])
def test_equals_batch_norm_on_the_concatenated_batch(world_size: int) -> None:
    counts = run_ranks(_compare_all, world_size, nprocs=world_size)
    assert counts == [20 * sum(len(shares) == world_size for shares in SHARES)] * world_size


def _channels_last() -> None:
    """The layer keeps the memory format, and its gradients; here the first layer, whose input needs none."""
    with _open() as strategy:
        synced, plain = _layers(strategy, nn.BatchNorm2d)
        whole = _batch(4, (2, 3), 0).to(memory_format=torch.channels_last)
        output = synced(whole[strategy.rank * 2 :][:2])
        assert output.is_contiguous(memory_format=torch.channels_last)
        output.square().sum().backward()
        plain(whole).square().sum().backward()
        for ours, its in zip(synced.parameters(), plain.parameters(), strict=True):
            _close_to(strategy.all_reduce(_gradient(ours)), _gradient(its))


def _one_value() -> None:
    """One value over all ranks is refused by all."""
    with _open() as strategy:
        layer, _ = _layers(strategy, nn.BatchNorm1d)
        rows = 1 if strategy.rank == 0 else 0
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer(_batch(rows, (), 0))
        with pytest.raises(ValueError, match="expected 2D or 3D input"):
            layer(torch.ones(2, 3, 4, 5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks()
def test_half_precision(dtype: torch.dtype) -> None:
    """Half-precision inputs with float32 weights, as under autocast: as good as torch's own."""
    with _open(precision="fp32") as strategy:
        layers: list[Any] = [nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)]
        synced, plain = layers
        _synchronisation(strategy).apply(synced)
        whole = _batch(6, (2, 2), 0).to(dtype)
        share: Any = whole[strategy.rank :: 2].requires_grad_()
        exact: Any = whole.float().requires_grad_()
        output, expected = synced(share), plain(exact)
        assert output.dtype == dtype
        tolerance: dict[str, Any] = {"rtol": torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
        torch.testing.assert_close(output.float(), expected[strategy.rank :: 2], **tolerance)
        seed = _batch(6, (2, 2), 1).to(dtype)
        output.backward(seed[strategy.rank :: 2])
        expected.backward(seed.float())
        assert share.grad.dtype == dtype
        torch.testing.assert_close(share.grad.float(), exact.grad[strategy.rank :: 2], **tolerance)
        torch.testing.assert_close(synced.running_var, plain.running_var)


def _twice_differentiated() -> None:
    """A second derivative is refused, not wrong."""
    with _open() as strategy:
        layer, _ = _layers(strategy, nn.BatchNorm1d)
        x = _batch(4, (), 0).requires_grad_()
        [gradient] = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        penalty = gradient.pow(2).sum()
        with pytest.raises(RuntimeError, match="once_differentiable"):
            penalty.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("check", [_channels_last, _one_value, _twice_differentiated])
def test_on_two_ranks(check: Callable[[], None]) -> None:
    run_ranks(check)


class Custom(nn.BatchNorm2d):
    pass


def test_derived_layers_are_refused() -> None:
    with (
        unitrain.init(backend="single", sync_batchnorm=True) as strategy,
        pytest.raises(ConfigError, match=r"'1'.*Custom.*sync_batchnorm to false"),
    ):
        strategy.prepare(nn.Sequential(nn.Conv2d(3, 3, 1), Custom(3)))


def torchs_own(sync_batchnorm: bool, dimensions: int) -> tuple[Tensor, Tensor, str]:
    strategy = unitrain.init(timeout_s=30, sync_batchnorm=sync_batchnorm, precision="fp64")
    layer = nn.SyncBatchNorm(3)
    prepared, optimizer = strategy.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    rows = torch.arange(4 * 3 * 2**dimensions, dtype=torch.float64).sin().view(4, 3, *[2] * dimensions)
    out = prepared(rows[strategy.rank :: strategy.world_size])
    strategy.step(out.pow(3).mean(), optimizer)
    return layer.running_mean, layer.weight.detach(), type(strategy.export(prepared)).__name__  # type: ignore[return-value]


@pytest.mark.parametrize("sync_batchnorm", [True, False])
@pytest.mark.parametrize("dimensions", [0, 2])
def test_torchs_own_layers_are_synchronised_on_a_cpu_too(sync_batchnorm: bool, dimensions: int) -> None:
    """Theirs refuse a CPU, and under Horovod they would silently use each rank's own statistics."""
    (mean, weight, kind), others = run_ranks(torchs_own, sync_batchnorm, dimensions)
    (alone, trained, _) = run_ranks(torchs_own, sync_batchnorm, dimensions, nprocs=1)[0]
    assert kind == "SyncBatchNorm"
    for found, expected in ((mean, alone), (others[0], alone), (weight, trained), (others[1], trained)):
        assert torch.allclose(found, expected, atol=1e-12)


def test_a_process_that_splits_batches_over_several_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = (torch.device("cpu"),) * 2
    monkeypatch.setattr("unitrain.backends.data_parallel._devices", lambda config: devices)
    with pytest.raises(ConfigError, match=r"sync_batchnorm is not supported by backend data_parallel on 2 devices"):
        unitrain.init(backend="data_parallel", device="cpu", sync_batchnorm=True)


def test_no_layer_waits_for_a_gpu() -> None:
    with Waits() as waits:
        ranks = LayerContext(communicator_on_gpu(), CurrentBatch())
        assert gather_statistics(torch.ones(2, CHANNELS, device=GPU_0), ranks, "layer").mean.device == GPU_0
    assert waits.found == []
