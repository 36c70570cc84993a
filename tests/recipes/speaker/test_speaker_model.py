"""The speaker recogniser's network and its features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from unitrain.recipes.speaker_verification import model as speaker_model


def test_it_has_the_size_of_the_paper() -> None:
    model = speaker_model.build("resnetse34l")
    # Chung et al. 2020, section 4.3: 1.4 million parameters.
    assert 1.35e6 < sum(p.numel() for p in model.parameters()) < 1.45e6
    # 34 layers with weights: 33 convolutions, without those of shortcuts, and the last one.
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1)]
    assert len(convolutions) + 1 == 34
    model.eval()
    assert model(torch.randn(2, 4000)).shape == (2, 512)


def test_features_are_those_of_another_library() -> None:
    pytest.importorskip("transformers")
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    filters = mel_filter_bank(257, 40, 0.0, 8000.0, 16_000, norm=None, mel_scale="htk")
    np.testing.assert_allclose(speaker_model.mel_filters(40, 512, 16_000).T, filters, atol=1e-6)
    waveform = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    louder = np.concatenate([[waveform[0] - 0.97 * waveform[1]], waveform[1:] - 0.97 * waveform[:-1]])
    # torch.stft puts the window in the middle of a frame; transformers puts it at the beginning.
    window = np.pad(window_function(400, "hamming", periodic=True), 56)
    power = spectrogram(louder, window, 512, 160, fft_length=512, power=2.0)
    expected = np.log(filters.T @ power + 1e-6)
    expected = (expected - expected.mean(1, keepdims=True)) / np.sqrt(expected.var(1, keepdims=True) + 1e-5)
    found = speaker_model.LogMel().double()(waveform[None])[0]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_pooling_weighs_frames_by_their_importance() -> None:
    pooling = speaker_model.AttentivePooling(4)
    x = torch.randn(2, 4, 5)
    nn.init.zeros_(pooling.context.weight)
    torch.testing.assert_close(pooling(x), x.mean(2))
    with torch.no_grad():
        pooling.hidden.weight.copy_(torch.eye(4))
        pooling.hidden.bias.zero_()
        pooling.context.weight.copy_(torch.tensor([[1e3, 0, 0, 0]]))
    x[:, 0, 3] = 9  # of the highest importance by far
    x[:, 0, :3] = x[:, 0, 4:] = -9
    torch.testing.assert_close(pooling(x), x[:, :, 3])
