"""Models of the recipes: torchvision's ResNets, and a small one that trains on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unitrain import CheckpointError, ConfigError, Strategy
from unitrain.recipes.shared.downloads import downloading

ModelName = Literal[
    "resnet8", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d", "resnext101_32x8d",
    "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2",
]  # fmt: skip
SMALL: ModelName = "resnet8"


class SmallResNet(nn.Module):
    """ResNet for CIFAR (He et al. 2015, section 4.2) with one block in each of its three stages."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1: nn.Conv2d = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1: nn.BatchNorm2d = nn.BatchNorm2d(16)
        self.layer1: _Block = _Block(16, 16, stride=1)
        self.layer2: _Block = _Block(16, 32, stride=2)
        self.layer3: _Block = _Block(32, 64, stride=2)
        self.fc: nn.Linear = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images (rows, 3, height, width)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return cast(Tensor, self.fc(x.mean((2, 3))))


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1: nn.Conv2d = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1: nn.BatchNorm2d = nn.BatchNorm2d(outputs)
        self.conv2: nn.Conv2d = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2: nn.BatchNorm2d = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def image_size(name: ModelName) -> int:
    """Return the height and width of the images that a model is meant for; other sizes work too."""
    return 32 if name == SMALL else 224


def build(name: ModelName, classes: int) -> nn.Module:
    """Return a model with random weights. Its last layer is ``fc``."""
    if name == SMALL:
        return SmallResNet(classes)
    from torchvision.models import get_model

    return cast(nn.Module, get_model(name, weights=None, num_classes=classes))


def load_pretrained(
    model: nn.Module, name: str, source: str, strategy: Strategy, *, rename: Callable[[str], str] = str
) -> list[str]:
    """Load weights into a model, and return the names of the layers that keep their random weights. Collective.

    These are the layers that are missing from ``source``, or have another shape there.

    Args:
        model: the model.
        name: its name; torchvision's weights are those of its model of this name.
        source: a file with a state dict or its URL, or ``torchvision`` for torchvision's pretrained weights.
        strategy: the strategy of this run; its rank 0 reads the file.
        rename: returns the model's name for a weight of the source.

    Raises:
        ConfigError: the weights don't exist or can't be read, or no layer matches.
    """
    try:
        state = _torchvision_weights(name, strategy) if source == "torchvision" else strategy.load(source)
    except CheckpointError as error:
        raise ConfigError(f"pretrained {source} can't be used: {error}") from None
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(
            f"pretrained {source} has no state dict, which maps names to tensors. Save model.state_dict() to the file."
        )
    own, state = model.state_dict(), {rename(key): value for key, value in state.items()}
    misfits = {_layer(key) for key in own if key in state and state[key].shape != own[key].shape}
    fitting = {key: state[key] for key in own if key in state and _layer(key) not in misfits}
    if not fitting:
        raise ConfigError(
            f"pretrained {source} has no layer with the name and shape of one of {name}: was it trained "
            "with another --model?"
        )
    model.load_state_dict(fitting, strict=False)
    # num_batches_tracked is missing from files of old versions of torch.
    return sorted({_layer(key) for key in own if key not in fitting and not key.endswith("num_batches_tracked")})


def _layer(key: str) -> str:
    return key.rpartition(".")[0]


def _torchvision_weights(name: str, strategy: Strategy) -> Mapping[str, Tensor]:
    if name == SMALL:
        raise ConfigError(f"torchvision has no weights for {name}: pass a file as --pretrained, or another --model.")
    from torchvision.models import get_model_weights

    weights = get_model_weights(name).DEFAULT
    remedy = f"Download {weights.url} on a machine with network access, and pass the file as --pretrained."
    # One process downloads; then the others on its host find the file.
    with strategy.main_first(), downloading(f"torchvision's weights for {name}", remedy):
        try:
            state = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        except UnpicklingError:  # torch checks the hash of downloads, but not of files in its cache
            raise ConfigError(
                f"the file in torch's cache is not torchvision's weights for {name}: it contains more than tensors. "
                f"Remove {Path(torch.hub.get_dir(), 'checkpoints', Path(weights.url).name)}."
            ) from None
    return cast(Mapping[str, Tensor], state)


def freeze_backbone(model: nn.Module) -> None:
    """Freeze all layers but the last. BatchNorm layers stay in eval mode, and keep their statistics."""
    model.requires_grad_(False).eval()
    cast(nn.Module, model.fc).requires_grad_(True)
