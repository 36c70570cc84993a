"""Models whose layers are on several devices of a process: they stay there, and train as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lazy_device import use_lazy_device
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import unitrain
from unitrain import StrategyConfig, UsageError
from unitrain.communication.backend import load_backend
from unitrain.features.ema import EMA
from unitrain.launch.detect import Launch

CPU_AND_LAZY = ("cpu", "lazy:0")


class Net(nn.Module):
    """Two halves, each on a device; the output is on that of the last."""

    def __init__(self, first: str, last: str) -> None:
        super().__init__()
        self.places = first, last
        self.first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(first)
        # Without running statistics: the lazy device loses their first update.
        self.last = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)).to(last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x.to(self.places[0])).to(self.places[1]))
        return out


class Trained(NamedTuple):
    """What a run has come to."""

    norms: list[float]
    weights: dict[str, Tensor]
    averaged: dict[str, Tensor]
    devices: list[str]


def train(devices: tuple[str, str], folder: str, **settings: Any) -> Trained:
    """Train an epoch, save, and train another one in a run that resumes; leave out a step that is not finite."""
    if "lazy:0" in devices:
        use_lazy_device()
    check = torch._amp_foreach_non_finite_check_and_unscale_

    def checked(gradients: Any, found: Tensor, one: Tensor) -> None:
        assert {gradient.device for gradient in gradients} == {found.device}
        check(gradients, found, one)

    setattr(torch, check.__name__, checked)
    settings = {"device": "cpu", "precision": "fp64", "clip_norm": 0.3, **settings}
    norms = []
    for epochs in (1, 2):
        with unitrain.init(timeout_s=30, sync_batchnorm=True, on_nonfinite="skip", **settings) as strategy:
            model = Net(*devices)
            optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
            model, optimizer = strategy.prepare(model, optimizer)
            generator = torch.Generator().manual_seed(0)
            data = TensorDataset(torch.randn(14, 3, generator=generator, dtype=torch.float64))
            loader = strategy.dataloader(data, global_batch_size=4)
            ema = strategy.add(EMA(model, 0.5))
            checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, loader=loader, ema=ema)
            checkpoint.resume()
            for epoch in loader.epochs(epochs):
                for (x,) in loader:
                    loss = strategy.unwrap(model)(x.to(model.last[2].weight.dtype)).square().mean()
                    if strategy.global_step == 1 and strategy.rank == strategy.world_size - 1:
                        loss = loss * float("nan")
                    result = strategy.step(loss, optimizer, weight=len(x) if epoch else None)
                    norms += [] if result.grad_norm is None else [result.grad_norm.item()]
                checkpoint.save()
            checkpoint.close()
            state = next(iter(optimizer.state.values()))
            assert state["momentum_buffer"].device == model.first[0].weight.device
            where = [str(parameter.device) for parameter in strategy.unwrap(model).parameters()]
            found = strategy.export(model).state_dict(), strategy.export(ema).state_dict()
    return Trained(norms, *found, where)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the training of one process on one device."""
    folder = str(tmp_path_factory.mktemp("plain"))
    made = run_ranks(train, ("cpu", "cpu"), folder, nprocs=1)[0]
    assert isinstance(made, Trained)
    return made


def assert_same(found: Trained, plain: Trained, devices: tuple[str, str]) -> None:
    assert found.devices == [devices[0]] * 4 + [devices[1]] * 4
    assert len(plain.norms) == 7
    assert found.norms == pytest.approx(plain.norms, rel=1e-9)
    for ours, theirs in ((found.weights, plain.weights), (found.averaged, plain.averaged)):
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=1e-9, atol=1e-11)


def test_one_process_trains_the_same_model(plain: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_same(run_ranks(train_with, CPU_AND_LAZY, str(tmp_path), {}, nprocs=1)[0], plain, CPU_AND_LAZY)
    assert "unitrain: the layers of Net stay on cpu, lazy:0." in capfd.readouterr().out


def train_with(devices: tuple[str, str], folder: str, settings: dict[str, Any]) -> Trained:
    return train(devices, folder, **settings)


@pytest.mark.all("one process trains such a model in make test")
@pytest.mark.parametrize(
    ("launcher", "settings"),
    [
        pytest.param("spawn", {"backend": "ddp"}, marks=pytest.mark.soak),
        ("spawn", {"backend": "ddp", "deterministic": True}),  # the core's buckets
        pytest.param("horovodrun", {"backend": "horovod"}, marks=[HOROVOD, pytest.mark.soak]),
    ],
)
def test_two_ranks_train_the_same_model(
    plain: Trained, launcher: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    found = run_ranks(train_with, CPU_AND_LAZY, str(tmp_path), settings, launcher=launcher)
    for one in found:
        assert_same(one, plain, CPU_AND_LAZY)


def refused() -> list[str]:
    use_lazy_device()
    said = []
    with unitrain.init(backend="ddp", device="cpu", timeout_s=30) as strategy:
        moved = strategy.prepare(Net("lazy:0", "lazy:0"))  # on one device, which is another
        assert all(parameter.is_cpu for parameter in moved.parameters())
    refusing: tuple[dict[str, Any], ...] = ({"backend": "fsdp"},)
    for settings in refusing:
        with unitrain.init(device="cpu", timeout_s=30, **settings) as strategy:
            with pytest.raises(UsageError) as error:
                strategy.prepare(Net(*CPU_AND_LAZY))
            said.append(str(error.value))
    return said


def test_what_can_t_be_right_is_refused_and_a_model_on_one_device_is_moved() -> None:
    for said in run_ranks(refused):
        assert said[0].startswith("the model's layers are on cpu, lazy:0, but FSDP has the shards of a rank on its one")


def test_data_parallel_refuses_them_and_names_the_backends_that_don_t(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load_backend("data_parallel")(StrategyConfig(device="cpu"), Launch("python"), torch.device("cpu"))
    model = Net("cpu", "cpu")
    backend.place(model)
    monkeypatch.setattr(backend, "devices", (torch.device("cuda:0"), torch.device("cuda:1")))
    monkeypatch.setattr("unitrain.backends.data_parallel.devices_of", lambda module: backend.devices)
    with pytest.raises(UsageError, match=r"on cuda:0, cuda:1, but DataParallel .* use backend single or ddp"):
        backend.place(model)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")])
def test_gpus_train_the_same_model(plain: Trained, devices: tuple[str, str], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 1 + ("cuda:1" in devices):
        pytest.skip("needs as many CUDA GPUs, and pytest -m gpu to see them")
    found = run_ranks(train_with, devices, str(tmp_path), {"device": "cuda:0"}, nprocs=1)[0]
    assert_same(found, plain, devices)
