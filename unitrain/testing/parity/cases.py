"""The cases: a small model, its data, one case per mode of the training step, and the record of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import Dataset

from unitrain import features

CLASSES = 5
STEPS = 20
EXACT = 1e-9


@dataclass(frozen=True)
class Case:
    """One mode of training, on data that are not shuffled."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the strategy; ``precision`` is fp64 by default."""
    steps: int = STEPS
    """Number of optimizer steps."""
    samples: int = 53
    """Number of samples; the last global batch of an epoch is incomplete."""
    global_batch: int = 10
    optimizer: Literal["sgd", "adamw"] = "sgd"
    batch_norm: bool = False
    tied: bool = False
    """Whether two layers share their weight, and the first layer is frozen."""
    weighted: bool = False
    """Whether the loss is a mean over tokens. Their number varies between samples."""
    overflow_at: int | None = None
    """The step with a sample that makes the scaled gradient overflow, on one rank; None for no step."""
    unequal_shares: bool = False
    """Whether rank 0 takes three times as many samples as each other rank."""
    tolerance: float = EXACT
    """Largest allowed deviation from the plain loop."""

    @property
    def precision(self) -> str:
        """The precision of both loops."""
        return str(self.settings.get("precision", "fp64"))


# Under autocast each rank rounds the gradient of its rows to 8 (bf16) or 11 (fp16) bits before the sum, whereas one
# device rounds once: by at most 2**-9 or 2**-12 of gradients that are below 0.35 here. SGD with momentum adds this to
# the weights with a factor of lr / (1 - momentum) = 0.5 in each of 20 steps: 2**-9 * 0.35 * 0.5 * 20 = 7e-3.
BF16_TOLERANCE = 7e-3
FP16_TOLERANCE = 9e-4

# Without them, ranks differ from one device where there is a BatchNorm.
AS_ONE_DEVICE = features.declared("AS_ONE_DEVICE")

CASES = (
    Case("plain"),
    Case("accumulate", {"accumulate": 3}),
    Case("clip_norm", {"clip_norm": 0.05}),
    Case("token_weights", {"accumulate": 2}, weighted=True),
    Case("stand_in", AS_ONE_DEVICE, samples=41, batch_norm=bool(AS_ONE_DEVICE)),
    Case("unequal_shares", AS_ONE_DEVICE, batch_norm=bool(AS_ONE_DEVICE), unequal_shares=True),
    Case("adamw", optimizer="adamw"),
    Case("tied_and_frozen", tied=True),
    Case("bf16", {"precision": "bf16"}, tolerance=BF16_TOLERANCE),
    Case("fp16_overflow", {"precision": "fp16"}, overflow_at=5, tolerance=FP16_TOLERANCE),
    *(Case(**arguments) for arguments in features.verified()),
)


class Digits(Dataset[tuple[int, Tensor, Tensor, Tensor]]):
    """Random images with a label and a number of tokens. A sample is (index, image, label, tokens).

    An image has the shape (1, 8, 8), and labels are from 0 to 4.

    Args:
        samples: the number of samples; also the seed.
    """

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.images: Tensor = torch.randn(samples, 1, 8, 8, generator=generator)
        self.labels: Tensor = torch.randint(CLASSES, (samples,), generator=generator)
        self.tokens: Tensor = torch.randint(1, 9, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor, Tensor]:
        return index, self.images[index], self.labels[index], self.tokens[index]


class Network(nn.Module):
    """A convolution and three linear layers; with or without BatchNorm, with or without a shared weight."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.convolution: nn.Conv2d = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.normalise: nn.Module = nn.BatchNorm2d(6) if case.batch_norm else nn.Identity()
        self.first: nn.Linear = nn.Linear(6 * 4, 24)
        self.second: nn.Linear = nn.Linear(24, 24)
        self.third: nn.Linear = nn.Linear(24, 24)
        self.last: nn.Linear = nn.Linear(24, CLASSES)
        # A weight that two layers share has one gradient, and must be averaged once.
        if case.tied:
            self.third.weight = self.second.weight
            self.convolution.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (rows, classes) of images (rows, 1, 8, 8)."""
        x = torch.relu(self.normalise(self.convolution(images)))
        # The mean of each quarter: torch's pooling layers have no deterministic backward on GPUs.
        x = x.reshape(len(x), 6, 2, 4, 2, 4).mean((3, 5)).flatten(1)
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.third(torch.tanh(self.second(x))))
        out: Tensor = self.last(x)
        return out


def build(case: Case) -> tuple[Network, Optimizer, LRScheduler]:
    """Return the model of a case, with the same weights in every call, its optimizer and its scheduler.

    Args:
        case: says which layers and which optimizer.
    """
    torch.manual_seed(7)
    model = Network(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Optimizer
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.01)
    return model, optimizer, StepLR(optimizer, step_size=7, gamma=0.8)


def mean_loss(case: Case, logits: Tensor, labels: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss over the rows, or over their tokens.

    Args:
        case: says which mean.
        logits: the outputs (rows, classes) of the model.
        labels: the labels (rows).
        tokens: the numbers of tokens (rows).
    """
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    if case.weighted:
        return (losses * tokens).sum() / tokens.sum()
    return losses.mean()


def overflow(case: Case, step: int, indices: Tensor, loss: Tensor) -> Tensor:
    """Return the loss, multiplied so that its scaled gradient overflows, in the step and rows that the case defines.

    Args:
        case: the case.
        step: the number of the optimizer step.
        indices: of the samples of the batch.
        loss: the loss of the batch.
    """
    steps_per_epoch = -(-case.samples // case.global_batch)
    chosen = step % steps_per_epoch * case.global_batch + 1  # the first row of rank 1, if there is one
    return loss * 1e38 if step == case.overflow_at and bool((indices == chosen).any()) else loss


@dataclass
class Trace:
    """One process's record of a case, the same for the plain loop and for each rank of a strategy."""

    samples: list[list[int]] = field(default_factory=list)
    """Indices of the samples of each optimizer step."""
    losses: list[tuple[float, float]] = field(default_factory=list)
    """Loss and weight (number of samples or tokens) of each batch."""
    gradients: list[Tensor] = field(default_factory=list)
    """Gradients of each step as passed to the optimizer, flattened."""
    norms: list[float] = field(default_factory=list)
    """Norm of the gradients of each step before clipping, in cases that clip by norm."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers at the end."""

    def watch(self, optimizer: Optimizer, full: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        """Record the gradients of every step of ``optimizer`` from now on.

        Args:
            optimizer: the optimizer that ``build`` has made, or the prepared one.
            full: gathers a gradient that is sharded, on all ranks.
        """

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            # At this moment they are averaged, unscaled and clipped.
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.gradients.append(torch.cat([full(g.detach()).double().reshape(-1).cpu() for g in gradients]))

        optimizer.register_step_pre_hook(before_step)

    def finish(self, model: nn.Module) -> None:
        """Record the weights, as float64 on the CPU."""
        self.weights = {name: t.detach().double().cpu().clone() for name, t in model.state_dict().items()}
