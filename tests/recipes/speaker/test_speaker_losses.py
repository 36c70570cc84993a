"""The speaker recogniser's losses: their values by definition."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from unitrain.errors import ConfigError
from unitrain.recipes.speaker_verification import losses as speaker_losses
from unitrain.recipes.speaker_verification.losses import LossName, SpeakerLoss

SPEAKERS, UTTERANCES, DIMENSIONS = 5, 3, 8
METRIC: tuple[LossName, ...] = ("proto", "angleproto", "ge2e")


def loss_of(name: LossName, utterances: int = UTTERANCES) -> SpeakerLoss:
    torch.manual_seed(1)
    return speaker_losses.build(
        name, dimensions=DIMENSIONS, speakers=SPEAKERS, utterances=utterances, margin=0.3, scale=20.0
    )


def assert_mean_loss(name: LossName, embeddings: Tensor, speakers: Tensor, expected: list[float]) -> None:
    loss = loss_of(name)
    assert loss(loss.head, embeddings, speakers).item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)


@pytest.fixture
def embeddings() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SPEAKERS * UTTERANCES, DIMENSIONS, generator=generator)


@pytest.fixture
def speakers() -> Tensor:
    return torch.tensor([3, 3, 3, 0, 0, 0, 4, 4, 4, 1, 1, 1, 2, 2, 2])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / math.sqrt(float(a @ a) * float(b @ b)))


def cross_entropy(logits: list[float], answer: int) -> float:
    return math.log(sum(map(math.exp, logits))) - logits[answer]


def mean(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows).mean(0)


@pytest.mark.parametrize("name", ["amsoftmax", "aamsoftmax"])
def test_margins(name: LossName, embeddings: Tensor, speakers: Tensor) -> None:
    loss = loss_of(name)
    weight = loss.head.get_parameter("weight").detach()
    embeddings[0] = -weight[3]  # the angle and the margin exceed pi
    expected = []
    for row, speaker in zip(embeddings, speakers.tolist(), strict=True):
        cosines = [cosine(row, one) for one in weight]
        angle = math.acos(max(-1.0, min(1.0, cosines[speaker])))
        if name == "amsoftmax":
            cosines[speaker] -= 0.3
        elif angle + 0.3 <= math.pi:
            cosines[speaker] = math.cos(angle + 0.3)
        else:
            cosines[speaker] -= 0.3 * math.sin(0.3)
        expected.append(cross_entropy([20 * one for one in cosines], speaker))
    assert_mean_loss(name, embeddings, speakers, expected)


def test_softmax_is_that_of_a_linear_layer(embeddings: Tensor, speakers: Tensor) -> None:
    loss = loss_of("softmax")
    weight, bias = loss.head.get_parameter("fc.weight").detach(), loss.head.get_parameter("fc.bias").detach()
    expected = [
        cross_entropy([float(row @ one + add) for one, add in zip(weight, bias, strict=True)], speaker)
        for row, speaker in zip(embeddings, speakers.tolist(), strict=True)
    ]
    assert_mean_loss("softmax", embeddings, speakers, expected)


@pytest.mark.parametrize("name", ["proto", "angleproto"])
def test_a_query_is_compared_with_the_means_of_the_other_utterances(
    name: LossName, embeddings: Tensor, speakers: Tensor
) -> None:
    groups = list(embeddings.view(SPEAKERS, UTTERANCES, DIMENSIONS))
    expected = []
    for i, group in enumerate(groups):
        prototypes = [mean(list(other[:-1])) for other in groups]
        if name == "proto":
            logits = [-float((group[-1] - prototype).square().sum()) for prototype in prototypes]
        else:
            logits = [10 * cosine(group[-1], prototype) - 5 for prototype in prototypes]
        expected.append(cross_entropy(logits, i))
    assert_mean_loss(name, embeddings, speakers, expected)


def test_ge2e_leaves_an_utterance_out_of_the_mean_of_its_own_speaker(embeddings: Tensor, speakers: Tensor) -> None:
    groups = list(embeddings.view(SPEAKERS, UTTERANCES, DIMENSIONS))
    expected = []
    for i, group in enumerate(groups):
        for u, utterance in enumerate(group):
            means = [mean([one for v, one in enumerate(other) if j != i or v != u]) for j, other in enumerate(groups)]
            expected.append(cross_entropy([10 * cosine(utterance, one) - 5 for one in means], i))
    assert_mean_loss("ge2e", embeddings, speakers, expected)


@pytest.mark.parametrize("name", get_args(LossName))
def test_gradients_are_finite_where_all_embeddings_are_perfect(name: LossName, speakers: Tensor) -> None:
    loss = loss_of(name)
    centres = dict(loss.head.named_parameters()).get("weight", torch.eye(SPEAKERS, DIMENSIONS)).detach()
    perfect = centres[speakers].clone().requires_grad_()
    loss(loss.head, perfect, speakers).backward()
    for tensor in (perfect, *loss.head.parameters()):
        assert tensor.grad is not None
        assert bool(tensor.grad.isfinite().all())


@pytest.mark.parametrize("name", METRIC)
def test_one_utterance_can_not_be_compared(name: LossName) -> None:
    with pytest.raises(ConfigError, match=f"loss {name} compares .* needs at least 2 utterances per speaker, not 1"):
        loss_of(name, utterances=1)
