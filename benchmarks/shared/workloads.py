"""Workloads of the benchmarks: models with one batch in memory, and the shapes of well-known models' parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unitrain.recipes.text import data as text
from unitrain.recipes.text import gpt

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """A model, an optimizer and one batch, which differs between ranks.

    Attributes:
        make: returns a new model, with the same initial weights in each call, and its optimizer.
        inputs: inputs of one micro-batch.
        targets: classes of the inputs.
    """

    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    inputs: Tensor
    targets: Tensor

    def loss(self, logits: Tensor) -> Tensor:
        """Return the mean loss of the batch."""
        return F.cross_entropy(logits, self.targets)


class TextTask(Task):
    """A task whose targets are tokens: one for each position of each row."""

    def loss(self, logits: Tensor) -> Tensor:
        """Return the mean loss of the tokens."""
        return F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())


def mlp(rank: int) -> Task:
    """Return an MLP so small that the overhead around it dominates: 32 rows, 64-64-10."""
    return _task(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), rank, (32, 64))


def resnet18(rank: int) -> Task:
    """Return torchvision's ResNet-18 on 8 images of 32 x 32: gradients dominate."""
    return _task(lambda: _from_torchvision("resnet18"), rank, (8, 3, 32, 32))


def _from_torchvision(name: str) -> nn.Module:
    from torchvision.models import get_model

    model: nn.Module = get_model(name, weights=None, num_classes=10)
    return model


def _task(build: Callable[[], nn.Module], rank: int, shape: Shape) -> Task:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = build()
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    generator = torch.Generator().manual_seed(rank)
    targets = torch.randint(10, shape[:1], generator=generator)
    return Task(make, torch.randn(shape, generator=generator), targets)


def transformer(rank: int, layers: int, width: int, rows: int, length: int) -> TextTask:
    """Return the language model of the recipes on rows of bytes, and AdamW."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: nn.Module = gpt.GPT(text.VOCABULARY, length, layers, width, max(1, width // 64), dropout=0.0)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    generator = torch.Generator().manual_seed(rank)
    inputs, targets = torch.randint(text.VOCABULARY, (2, rows, length), generator=generator)
    return TextTask(make, inputs, targets)


def resnet18_shapes() -> list[Shape]:
    """Return the shapes of ResNet-18's 62 parameters: 47 MB."""
    return _shapes("resnet18")


def resnet50_shapes() -> list[Shape]:
    """Return the shapes of ResNet-50's 161 parameters: 102 MB."""
    return _shapes("resnet50")


def _shapes(name: str) -> list[Shape]:
    from torchvision.models import get_model

    with torch.device("meta"):
        return [tuple(p.shape) for p in get_model(name, weights=None).parameters()]


def transformer_shapes() -> list[Shape]:
    """Return the shapes of the parameters of 12 encoder layers of width 512: 144 tensors, 151 MB."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        return [tuple(p.shape) for p in nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).parameters()]


class OnlyParameters(nn.Module):
    """Parameters whose gradients cost one write each, so that a step consists of what is done with them.

    ``forward(scale)`` returns the sum of all elements times ``scale``, so each gradient is ``scale``. As in other
    models, backward computes the gradients of the last parameters first.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, scale: Tensor) -> Tensor:
        """Return a scalar."""
        total = torch.zeros(())
        for value in self.values:
            total = total + value.sum() * scale
        return total


def bit_equal(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models, wrapped or not, have the same weights, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(_parameters(one), _parameters(other), strict=True))


def _parameters(model: nn.Module) -> Iterable[Tensor]:
    return (p.detach() for p in model.parameters())
