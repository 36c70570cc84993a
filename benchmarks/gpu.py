"""Images a second on a GPU: ResNet-50 and ViT-B/16, bf16 and channels_last, with and without torch.compile.

    python benchmarks/gpu.py

One process and one GPU, with batches already in GPU memory: a hand-tuned loop, UniTrain, Accelerate and Lightning
Fabric take turns. The hand-tuned loop and UniTrain use the same options: TF32, cuDNN's benchmark mode, autocast to
bf16, channels_last, a fused optimizer. Images per second are also given as a share of the GPU's throughput: the model's
operations (as torch counts them) over those of a large bf16 matrix product, measured in the same process. Ignite is
left out because its trainer's autocast uses fp16.

All end within six minutes: a case that takes over two, or for which nothing is left, is left out with the reason. A
small batch shows the cost of the host.
Without a GPU nothing is measured, and the result says so. ``--short`` runs tiny shapes on the CPU.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import unitrain
from shared.processes import ALONE, in_processes
from shared.report import Found, run, table
from shared.rounds import Way, alternate, compared, shown_ratio

HAND, CONTROL, OURS, ACCELERATE, FABRIC = "tuned by hand", "tuned by hand, again", "UniTrain", "Accelerate", "Fabric"
# Model, batch size, and whether it is compiled; the quick ones first.
CASES = [("resnet50", 256, False), ("resnet50", 32, False), ("vit_b_16", 256, False), ("vit_b_16", 256, True),
         ("resnet50", 256, True)]  # fmt: skip
SHORT_CASES = [("resnet50", 2, False), ("vit_b_16", 2, True)]
ROUNDS, SHORT_ROUNDS = 7, 2
ROUND_S = 0.6  # of one loop
ALL_S, CASE_S = 360.0, 120.0
MATRIX, SHORT_MATRIX = 8192, 128

Step = Callable[[], object]


class Training:
    """Training of a model on a device, with each framework as in its guide."""

    def __init__(self, model: str, batch: int, device: torch.device, compiled: bool, small: bool) -> None:
        size = 32 if small else 224
        self._name, self._small, self._device, self._compiled = model, small, device, compiled
        images = torch.randn(batch, 3, size, size, device=device)
        self.images = images.to(memory_format=torch.channels_last)
        self.labels = torch.randint(1000, (batch,), device=device)

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model on its device, and its optimizer."""
        torch.manual_seed(0)
        model = self.build().to(self._device).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        if self._compiled:
            # Inductor takes half a minute per model, and a short run only needs to show that compiled models train.
            model = cast(nn.Module, torch.compile(model, backend="aot_eager" if self._small else "inductor"))
        return model, optimizer

    def build(self) -> nn.Module:
        """Return a new model."""
        from torchvision.models import VisionTransformer, get_model

        if self._small and self._name == "vit_b_16":
            vit: nn.Module = VisionTransformer(32, 16, 2, 2, 32, 64)
            return vit
        model: nn.Module = get_model("resnet18" if self._small else self._name, weights=None)
        return model

    def loss(self, logits: Tensor) -> Tensor:
        """Return the mean loss."""
        return F.cross_entropy(logits, self.labels)

    def by_hand(self) -> Step:
        """Return the step of the hand-tuned loop."""
        model, optimizer = self.make()

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self._device.type, torch.bfloat16):
                loss = self.loss(model(self.images))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    def ours(self, strategy: unitrain.Strategy) -> Step:
        """Return the step with a strategy."""
        model, optimizer = strategy.prepare(*self.make())

        def step() -> None:
            with strategy.autocast():
                loss = self.loss(model(self.images))
            strategy.step(loss, optimizer)

        return step

    def accelerate(self) -> Step:
        """Return the step with Accelerate."""
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=self._device.type == "cpu", mixed_precision="bf16")
        model, optimizer = accelerator.prepare(*self.make())

        def step() -> None:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = self.loss(model(self.images))
            accelerator.backward(loss)
            optimizer.step()

        return step

    def fabric(self) -> Step:
        """Return the step with Lightning Fabric."""
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments.lightning import LightningEnvironment

        accelerator = "cpu" if self._device.type == "cpu" else "cuda"
        fabric = Fabric(accelerator=accelerator, devices=1, precision="bf16-mixed", plugins=[LightningEnvironment()])
        model, optimizer = fabric.setup(*self.make())

        def step() -> None:
            optimizer.zero_grad()
            with fabric.autocast():
                loss = self.loss(model(self.images))
            fabric.backward(loss)
            optimizer.step()

        return step


def measure_model(model: str, batch: int, compiled: bool, small: bool) -> Found:
    """Measure each framework's step, in turns, and the GPU's throughput."""
    device = "cpu" if small else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
    with unitrain.init(
        backend="single", device=device, precision="bf16"
    ) as strategy:  # on hosts with several GPUs, too
        training = Training(model, batch, strategy.device, compiled, small)
        made = {
            HAND: training.by_hand(),
            CONTROL: training.by_hand(),
            OURS: training.ours(strategy),
            ACCELERATE: training.accelerate(),
            FABRIC: training.fabric(),
        }
        steps = 1 if small else _steps_per_round(made[HAND], strategy.device)
        ways: dict[str, Way] = {name: partial(_repeat, step, steps, strategy.device) for name, step in made.items()}
        seconds = alternate(ways, SHORT_ROUNDS if small else ROUNDS)
        found: Found = {"ways": compared(seconds, HAND, steps * batch)}
        limit = matrix_product(strategy.device, SHORT_MATRIX if small else MATRIX)
        return {**found, "operations_per_image": operations(model, small), "limit_per_s": limit}


def operations(model: str, small: bool) -> float:
    """Return the operations of a forward and backward per image, counted without computing them."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        training = Training(model, 2, torch.device("meta"), False, small)
        training.loss(training.build()(training.images)).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops()) / 2


def matrix_product(device: torch.device, size: int) -> float:
    """Return the operations per second of a bf16 matrix product."""
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    times = 10
    seconds = alternate({"product": partial(_repeat, lambda: matrix @ matrix, times, device)}, 3)["product"]
    return 2 * size**3 * times / min(seconds)


def _steps_per_round(step: Step, device: torch.device) -> int:
    _repeat(step, 5, device)  # cuDNN tries its algorithms, and models are compiled
    start = time.perf_counter()
    _repeat(step, 3, device)
    return max(1, round(ROUND_S / (time.perf_counter() - start) * 3))


def _repeat(step: Step, steps: int, device: torch.device) -> None:
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(short: bool) -> Found:
    if not short and not torch.cuda.is_available():
        return {"not_run": "there is no GPU here", "cases": []}
    ends, cases = time.monotonic() + ALL_S, []
    those = SHORT_CASES if short else CASES
    for model, batch, compiled in those:
        how: dict[str, Any] = {"model": model, "batch": batch, "compiled": compiled}
        left = max(1.0, min(CASE_S, ends - time.monotonic()))
        try:
            its = in_processes(ALONE, measure_model, deadline=left, small=short, **how)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            if short:
                raise
            late = isinstance(error, subprocess.TimeoutExpired)
            its = {"left_out": f"not ended in {left:.0f} s" if late else str(error).splitlines()[-1], "ways": {}}
        cases.append({**how, **its})
        print(tables({"not_run": None, "cases": cases[-1:]}), file=sys.stderr, flush=True)
    return {"not_run": None, "cases": cases}


def tables(found: Found) -> str:
    if found["not_run"]:
        return f"**Not run**: {found['not_run']}."
    cases = found["cases"]
    rows = [
        [
            case["model"], case["batch"], "yes" if case["compiled"] else "no", name,
            f"{1 / one['seconds']:,.0f}", shown_ratio(one),
            f"{case['operations_per_image'] / one['seconds'] / case['limit_per_s']:.0%}",
        ]
        for case in cases for name, one in case["ways"].items()
    ]  # fmt: skip
    head = [
        "model",
        "batch",
        "compiled",
        "loop",
        "images/s",
        "time / by hand's (quartiles)",
        "share of the limit",
    ]
    notes = ["The limit is the speed of a large bf16 matrix product, measured beside."]
    notes += [f"Left out: {case['model']}, {case['batch']}: {case['left_out']}" for case in cases if "left_out" in case]
    return "\n".join([table(head, rows), *notes])


if __name__ == "__main__":
    run(measure, tables)
