"""The speaker recogniser: a ResNet with squeeze and excitation on log-mel features, pooled over time by attention.

"Fast ResNet-34" of Chung et al., "In defence of metric learning for speaker recognition" (Interspeech 2020), which
clovaai's voxceleb_trainer calls ResNetSE34L, and a smaller one for CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unitrain.recipes.speaker_verification.speech import SAMPLE_RATE

ModelName = Literal["resnetse10", "resnetse34l"]
_FFT, _WINDOW, _HOP = 512, 400, 160  # samples: a window of 25 ms every 10 ms
_MELS = 40


def build(name: ModelName) -> SpeakerNet:
    """Return a model with random weights."""
    if name == "resnetse10":
        return SpeakerNet(blocks=(1, 1, 1, 1), channels=(8, 16, 32, 64), stride=2, dimensions=128)
    return SpeakerNet(blocks=(3, 4, 6, 3), channels=(16, 32, 64, 128), stride=1, dimensions=512)


class SpeakerNet(nn.Module):
    """Maps waveforms (rows, samples) to embeddings (rows, dimensions), which are alike for the same speaker.

    Args:
        blocks: number of residual blocks in each stage.
        channels: number of channels in each stage.
        stride: stride of the first layer over time.
        dimensions: length of an embedding.

    Attributes:
        dimensions: length of an embedding.
    """

    def __init__(self, blocks: Sequence[int], channels: Sequence[int], stride: int, dimensions: int) -> None:
        super().__init__()
        self.dimensions: int = dimensions
        self.features: LogMel = LogMel()
        first = nn.Conv2d(1, channels[0], 7, stride=(2, stride), padding=3, bias=False)
        self.stem: nn.Sequential = nn.Sequential(first, nn.BatchNorm2d(channels[0]), nn.ReLU())
        stages: list[nn.Module] = []
        inputs = channels[0]
        for count, outputs, step in zip(blocks, channels, (1, 2, 2, 1), strict=True):
            for i in range(count):
                stages.append(_Block(inputs, outputs, step if i == 0 else 1))
                inputs = outputs
        self.stages: nn.Sequential = nn.Sequential(*stages)
        self.pool: AttentivePooling = AttentivePooling(inputs)
        self.fc: nn.Linear = nn.Linear(inputs, dimensions)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, waveforms: Tensor) -> Tensor:
        """Return the embeddings of waveforms."""
        x = self.stages(self.stem(self.features(waveforms).unsqueeze(1)))
        return cast(Tensor, self.fc(self.pool(x.mean(2))))


class LogMel(nn.Module):
    """Log-mel features (rows, 40, frames) of waveforms: every band has mean 0 and variance 1 over an utterance."""

    def __init__(self) -> None:
        super().__init__()
        self.window: Tensor
        self.filters: Tensor
        self.register_buffer("window", torch.hamming_window(_WINDOW), persistent=False)
        self.register_buffer("filters", mel_filters(_MELS, _FFT, SAMPLE_RATE), persistent=False)
        self.norm: nn.InstanceNorm1d = nn.InstanceNorm1d(_MELS)

    @torch.no_grad()
    def forward(self, waveforms: Tensor) -> Tensor:
        """Return the features of waveforms (rows, samples)."""
        with torch.autocast(waveforms.device.type, enabled=False):  # powers exceed the range of fp16
            louder = F.pad(waveforms, (1, 0), mode="reflect")
            louder = louder[:, 1:] - 0.97 * louder[:, :-1]  # pre-emphasis of high frequencies
            spectrum = torch.stft(louder, _FFT, _HOP, _WINDOW, self.window, return_complex=True)
            power = torch.view_as_real(spectrum).square().sum(-1)
            return cast(Tensor, self.norm((self.filters @ power + 1e-6).log()))


def mel_filters(bands: int, fft: int, rate: int) -> Tensor:
    """Return triangular filters (bands, fft // 2 + 1) whose centres are evenly spaced on the mel scale.

    The scale is 2595 log10(1 + f / 700) (O'Shaughnessy, "Speech communication: human and machine", 1987).
    """
    highest = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, highest, bands + 2, dtype=torch.float64) / 2595) - 1)
    frequencies = torch.linspace(0, rate / 2, fft // 2 + 1, dtype=torch.float64)
    lower, centre, upper = (edges[i : i + bands, None] for i in range(3))
    rising, falling = (frequencies - lower) / (centre - lower), (upper - frequencies) / (upper - centre)
    return torch.minimum(rising, falling).clamp(min=0).float()


class AttentivePooling(nn.Module):
    """Self-attentive pooling (Cai et al., "Exploring the encoding layer and loss function", Odyssey 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.hidden: nn.Linear = nn.Linear(channels, channels)
        self.context: nn.Linear = nn.Linear(channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean (rows, channels) of frames (rows, channels, frames), weighted by their importance."""
        importance = self.context(self.hidden(x.transpose(1, 2)).tanh()).softmax(1)
        return cast(Tensor, (x @ importance).squeeze(2))


class _Block(nn.Module):
    """Residual block (He et al. 2015) with squeeze and excitation (Hu et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1: nn.Conv2d = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1: nn.BatchNorm2d = nn.BatchNorm2d(outputs)
        self.conv2: nn.Conv2d = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2: nn.BatchNorm2d = nn.BatchNorm2d(outputs)
        self.gate: nn.Sequential = nn.Sequential(
            nn.Linear(outputs, outputs // 8), nn.ReLU(), nn.Linear(outputs // 8, outputs), nn.Sigmoid()
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y = y * self.gate(y.mean((2, 3)))[:, :, None, None]
        return F.relu(y + self.shortcut(x))
