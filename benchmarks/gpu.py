"""Images a second on a GPU: ResNet-50 and ViT-B/16, bf16 and channels_last, with and without torch.compile.

    python benchmarks/gpu.py

One process and one GPU, with batches already in GPU memory: a hand-tuned loop, UniTrain, Accelerate and Lightning
Fabric take turns. The hand-tuned loop and UniTrain use the same options: TF32, cuDNN's benchmark mode, autocast to
bf16, channels_last, a fused optimizer. Images per second are also given as a share of the GPU's throughput: the model's
operations (as torch counts them) over those of a large bf16 matrix product, measured in the same process. Ignite is
left out because its trainer's autocast uses fp16.

Without a GPU nothing is measured, and the result says so. ``--short`` runs tiny shapes on the CPU.
"""

from __future__ import annotations

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

MODELS = {"resnet50": 256, "vit_b_16": 256}  # with batch sizes
HAND, CONTROL, OURS, ACCELERATE, FABRIC = "tuned by hand", "tuned by hand, again", "UniTrain", "Accelerate", "Fabric"
CASES = [(model, compiled) for model in MODELS for compiled in (False, True)]
SHORT_CASES = [("resnet50", False), ("vit_b_16", True)]
LENGTH, SHORT = (9, 20), (2, 1)  # rounds, and steps per round
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


def measure_model(model: str, batch: int, compiled: bool, rounds: int, steps: int, small: bool) -> Found:
    """Measure each framework's step, in turns, and the GPU's throughput."""
    device = "cpu" if small else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
    with unitrain.init(
        backend="single", device=device, precision="bf16"
    ) as strategy:  # on hosts with several GPUs, too
        training = Training(model, batch, strategy.device, compiled, small)
        with FlopCounterMode(display=False) as counter:
            training.loss(training.build().to(strategy.device)(training.images)).backward()  # type: ignore[no-untyped-call]
        made = {
            HAND: training.by_hand(),
            CONTROL: training.by_hand(),
            OURS: training.ours(strategy),
            ACCELERATE: training.accelerate(),
            FABRIC: training.fabric(),
        }
        ways: dict[str, Way] = {name: partial(_repeat, step, steps, strategy.device) for name, step in made.items()}
        found: Found = {"ways": compared(alternate(ways, rounds), HAND, steps * batch)}
        limit = matrix_product(strategy.device, SHORT_MATRIX if small else MATRIX)
        return {**found, "operations_per_image": counter.get_total_flops() / batch, "limit_per_s": limit}


def matrix_product(device: torch.device, size: int) -> float:
    """Return the operations per second of a bf16 matrix product."""
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    times = 10
    seconds = alternate({"product": partial(_repeat, lambda: matrix @ matrix, times, device)}, 3)["product"]
    return 2 * size**3 * times / min(seconds)


def _repeat(step: Step, steps: int, device: torch.device) -> None:
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(short: bool) -> Found:
    if not short and not torch.cuda.is_available():
        return {"not_run": "there is no GPU here", "cases": []}
    rounds, steps = SHORT if short else LENGTH
    cases = []
    for model, compiled in SHORT_CASES if short else CASES:
        how: dict[str, Any] = {"model": model, "compiled": compiled, "batch": 2 if short else MODELS[model]}
        its = in_processes(ALONE, measure_model, rounds=rounds, steps=steps, small=short, **how)
        cases.append({**how, **its})
    return {"not_run": None, "cases": cases}


def tables(found: Found) -> str:
    if found["not_run"]:
        return f"**Not run**: {found['not_run']}."
    rows = [
        [
            case["model"], "yes" if case["compiled"] else "no", name, f"{1 / one['seconds']:,.0f}", shown_ratio(one),
            f"{case['operations_per_image'] / one['seconds'] / case['limit_per_s']:.0%}",
        ]
        for case in found["cases"] for name, one in case["ways"].items()
    ]  # fmt: skip
    head = [
        "model",
        "compiled",
        "loop",
        "images/s",
        "time / by hand's (quartiles)",
        "share of the limit",
    ]
    return f"{table(head, rows)}\nThe limit is the speed of a large bf16 matrix product, measured beside."


if __name__ == "__main__":
    run(measure, tables)
