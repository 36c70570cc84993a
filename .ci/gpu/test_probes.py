"""What one process can show on the GPU, beside the contract and the tests that are marked gpu. Costs are printed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.profiler import profile
from torch.utils.data import TensorDataset

import unitrain
from unitrain.communication.backend import load_backend
from unitrain.config import StrategyConfig
from unitrain.launch.detect import Launch

DEVICE = os.environ.get("GPU_DEVICE") or ("cuda:0" if torch.cuda.is_available() else "sim")
ON_GPU = pytest.mark.skipif(DEVICE == "sim", reason="needs a CUDA GPU")
MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW, fused": partial(AdamW, fused=True),
    "AdamW": AdamW,
    "SGD without momentum": partial(SGD, lr=0.1, fused=True),
}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4)).to(dtype)


def opened(**settings: Any) -> unitrain.Strategy:
    return unitrain.init(**{"backend": "single", "device": DEVICE, **settings})


# -------------------------------------------------------------------------------------------------------- behaviour


def trained(folder: Path, until: int, save_after: int | None = None) -> Tensor:
    """Train with dropout, from the checkpoint if there is one, and return the weights."""
    with opened(seed=3) as strategy:
        module = net()
        model, optimizer = strategy.prepare(module, AdamW(module.parameters(), fused=True))
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        checkpoint.resume()
        rows = torch.randn(10, 8, 16, generator=torch.Generator().manual_seed(1)).to(strategy.device)
        while strategy.global_step < until:
            strategy.step(model(rows[strategy.global_step]).square().mean(), optimizer)
            if strategy.global_step == save_after:
                checkpoint.save()
        checkpoint.close()
        return torch.cat([p.detach().cpu().flatten() for p in module.parameters()])


def test_dropout_goes_on_after_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 10)
    trained(tmp_path / "parts", 7, save_after=5)  # the last two steps are lost
    assert torch.equal(trained(tmp_path / "parts", 10), whole)


def test_a_run_on_the_cpu_leaves_the_gpu_alone(tmp_path: Path) -> None:
    script = (
        "import torch, unitrain\n"
        "strategy = unitrain.init(device='cpu', backend='single')\n"
        "strategy.checkpoint('run', model=strategy.prepare(torch.nn.Linear(2, 2))).save()\n"
        "strategy.close()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("maker", list(MAKERS))
def test_weights_in_bf16_are_trained(maker: str) -> None:
    with opened() as strategy:
        module = net(torch.bfloat16)
        model, optimizer = strategy.prepare(module, MAKERS[maker](module.parameters()))
        rows = torch.ones(2, 16, device=strategy.device, dtype=torch.bfloat16)
        assert all(strategy.step(model(rows).float().mean(), optimizer).stepped for _ in range(3))


def test_samples_that_lie_on_the_gpu_are_read() -> None:
    with opened() as strategy:
        data = TensorDataset(torch.arange(64.0, device=strategy.device))
        read = [x for (batch,) in strategy.dataloader(data, global_batch_size=16) for x in batch.tolist()]
    assert sorted(read) == list(range(64))


@pytest.mark.parametrize("compile_", [True, "reduce-overhead"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_models_train_as_eager_ones(compile_: Any, precision: str) -> None:
    if DEVICE == "sim":  # which the compiler does not know
        settings: dict[str, Any] = {"device": "cpu", "compile": True}
    else:
        settings = {"compile": compile_}
    ends = []
    for how in (settings, {"device": settings.get("device", DEVICE)}):
        with opened(precision=precision, accumulate=2, **how) as strategy:
            module = net().eval()  # without dropout
            model, optimizer = strategy.prepare(module, SGD(module.parameters(), lr=0.1, momentum=0.9))
            generator = torch.Generator().manual_seed(1)
            for _ in range(6):
                rows = torch.randn(8, 16, generator=generator).to(strategy.device)
                strategy.step(model(rows).float().square().mean(), optimizer)
            ends.append(torch.cat([p.detach().cpu().flatten() for p in module.parameters()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-5 if precision == "fp32" else 1e-2)


@ON_GPU
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_two_replicas_on_one_gpu_have_the_gradient_of_the_whole_batch(rows: int) -> None:
    gpu = torch.device(DEVICE)
    backend = load_backend("data_parallel")(StrategyConfig(device=DEVICE), Launch("python"), gpu)
    backend.devices = (gpu, gpu)
    gradients = []
    batch = torch.randn(rows, 4, device=gpu, dtype=torch.float64)
    for wrap in (backend.wrap_model, nn.Sequential):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double().to(gpu)
        mse_loss(wrap(model)(batch), batch.sum(1, keepdim=True)).backward()  # type: ignore[no-untyped-call]
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------ costs


@pytest.mark.parametrize(
    ("maker", "settings", "most"),
    [
        ("AdamW, fused", {}, 0),
        ("AdamW, fused", {"clip_norm": 1.0}, 0),
        ("AdamW, fused", {"precision": "bf16"}, 0),
        ("AdamW", {}, 1),
        ("SGD without momentum", {}, 1),
    ],
)
@pytest.mark.parametrize("weight", [None, 5.0])
def test_cost_in_waits_of_the_host(maker: str, settings: dict[str, Any], most: int, weight: float | None) -> None:
    """A wait for an event, such as for the verdict on the last step, is not counted: torch does not tell of it."""
    steps = 4
    with opened(**settings) as strategy, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        module = net()
        model, optimizer = strategy.prepare(module, MAKERS[maker](module.parameters()))
        rows = torch.randn(8, 16).to(strategy.device)
        for step in range(2 + steps):
            if step == 2 and DEVICE != "sim":
                torch.cuda.set_sync_debug_mode("warn")
            strategy.step(model(rows).float().square().mean(), optimizer, weight=weight)
        if DEVICE != "sim":
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in seen if "called a synchronizing" in str(w.message))
    print(f"\nwaits in {steps} steps of {maker} {settings} weight={weight}: {dict(places) or 'none'}")
    assert sum(places.values()) <= most * steps


def ways(strategy: unitrain.Strategy) -> dict[str, Callable[[], object]]:
    """Return the steps of benchmarks/gpu.py on ResNet, by hand and ours."""
    from gpu import Training

    training = Training("resnet50", 64 if DEVICE != "sim" else 2, strategy.device, False, DEVICE == "sim")
    return {"by hand": training.by_hand(), "ours": training.ours(strategy)}


@ON_GPU
def test_cost_in_memory() -> None:
    peaks = {}
    with opened(precision="bf16") as strategy:
        for name, step in ways(strategy).items():
            before = torch.cuda.memory_allocated()
            for _ in range(4):  # by hand, gradients are kept between steps
                torch.cuda.reset_peak_memory_stats()
                step()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    print("\nMiB at the peak of a step, beside model and batch:", peaks)
    assert peaks["ours"] < peaks["by hand"] + 16


@ON_GPU
def test_cost_in_launches() -> None:
    calls = {}
    with opened(precision="bf16") as strategy:
        for name, step in ways(strategy).items():
            for _ in range(5):
                step()
            with profile() as seen:
                for _ in range(3):
                    step()
                torch.cuda.synchronize()
            counts = Counter(event.name for event in seen.events() if event.name.startswith("cuda"))
            calls[name] = {call: count / 3 for call, count in counts.most_common(6)}
    print("\ncalls of CUDA in a step:", calls)
    assert calls["ours"]["cudaLaunchKernel"] < calls["by hand"]["cudaLaunchKernel"] + 20


@ON_GPU
def test_cost_of_copies_beside_computation() -> None:
    """Batches are copied while the GPU computes: an epoch takes as long as its computation, or its copies."""
    rows, took = torch.randn(256, 3, 512, 512), {}
    with opened() as strategy:
        work = torch.randn(4096, 4096, device=strategy.device)
        for name, (copies, products) in {"copies": (True, 0), "products": (False, 8), "both": (True, 8)}.items():
            loader = strategy.dataloader(TensorDataset(rows), global_batch_size=16, num_workers=2, shuffle=False)
            for _ in range(2):  # the first is for warm-up
                start = time.perf_counter()
                for _ in loader if copies else range(16):
                    for _ in range(products):
                        work = work @ work / work.norm()
                torch.cuda.synchronize()
                took[name] = round(time.perf_counter() - start, 3)
    print("\nseconds of an epoch:", took)


@ON_GPU
def test_cost_of_a_save_beside_training(tmp_path: Path) -> None:
    """A save holds the host while it starts copies, and the GPU goes on; then it is written in the background."""
    from gpu import Training

    took: dict[str, list[float]] = {"plain": [], "with a save": [], "save()": [], "copy to warm, pinned buffers": []}
    with opened(precision="bf16") as strategy:
        training = Training("resnet50", 64, strategy.device, False, False)
        model, optimizer = strategy.prepare(*training.make())
        checkpoint = strategy.checkpoint(tmp_path, model=model, optimizer=optimizer)

        def step() -> None:
            with strategy.autocast():
                loss = training.loss(model(training.images))
            strategy.step(loss, optimizer)

        for _ in range(5):
            step()
        tensors = [*model.state_dict().values(), *(v for one in optimizer.state.values() for v in one.values())]
        pairs = [(torch.empty_like(t, device="cpu", pin_memory=True), t) for t in tensors if isinstance(t, Tensor)]
        for way in ("plain", "with a save") * 4:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(20):
                step()
                if i == 9 and way != "plain":
                    began = time.perf_counter()
                    checkpoint.save()
                    took["save()"].append(time.perf_counter() - began)
            torch.cuda.synchronize()
            took[way].append(time.perf_counter() - start)
            start = time.perf_counter()
            for buffer, tensor in pairs:
                buffer.copy_(tensor, non_blocking=True)
            torch.cuda.synchronize()
            took["copy to warm, pinned buffers"].append(time.perf_counter() - start)
            checkpoint.wait()
    size = sum(buffer.nbytes for buffer, _ in pairs) / 1e6
    print(f"\nms, 20 steps, {size:.0f} MB:", {name: [round(1e3 * s, 1) for s in all_] for name, all_ in took.items()})
