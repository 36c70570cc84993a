"""The speaker recogniser's losses: their values by definition, and their gradients over the ranks."""

from __future__ import annotations

import math
from typing import Any, get_args

import needs
import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import TensorDataset

import unitrain
from unitrain.errors import ConfigError
from unitrain.recipes.speaker_verification import losses as speaker_losses
from unitrain.recipes.speaker_verification import model as speaker_model
from unitrain.recipes.speaker_verification.batches import in_batch_order
from unitrain.recipes.speaker_verification.losses import LossName, SpeakerLoss

SPEAKERS, UTTERANCES, DIMENSIONS = 5, 3, 8
METRIC: tuple[LossName, ...] = ("proto", "angleproto", "ge2e")


def loss_of(name: LossName, dimensions: int = DIMENSIONS) -> SpeakerLoss:
    torch.manual_seed(1)
    return speaker_losses.build(
        name, dimensions=dimensions, speakers=SPEAKERS, utterances=UTTERANCES, margin=0.3, scale=20.0
    )


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


# --------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("name", ["amsoftmax", "aamsoftmax"])
def test_margins(name: LossName, embeddings: Tensor, speakers: Tensor) -> None:
    loss = loss_of(name)
    weight = loss.head.get_parameter("weight").detach()
    embeddings[0] = -weight[3]  # the angle and the margin exceed pi
    found = loss(loss.head, embeddings, speakers)
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
    assert found.item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_softmax_is_that_of_a_linear_layer(embeddings: Tensor, speakers: Tensor) -> None:
    loss = loss_of("softmax")
    weight, bias = loss.head.get_parameter("fc.weight").detach(), loss.head.get_parameter("fc.bias").detach()
    expected = [
        cross_entropy([float(row @ one + add) for one, add in zip(weight, bias, strict=True)], speaker)
        for row, speaker in zip(embeddings, speakers.tolist(), strict=True)
    ]
    assert loss(loss.head, embeddings, speakers).item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)


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
    loss = loss_of(name)
    assert loss(loss.head, embeddings, speakers).item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_ge2e_leaves_an_utterance_out_of_the_mean_of_its_own_speaker(embeddings: Tensor, speakers: Tensor) -> None:
    groups = list(embeddings.view(SPEAKERS, UTTERANCES, DIMENSIONS))
    expected = []
    for i, group in enumerate(groups):
        for u, utterance in enumerate(group):
            means = [mean([one for v, one in enumerate(other) if j != i or v != u]) for j, other in enumerate(groups)]
            expected.append(cross_entropy([10 * cosine(utterance, one) - 5 for one in means], i))
    loss = loss_of("ge2e")
    assert loss(loss.head, embeddings, speakers).item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)


@pytest.mark.parametrize("name", METRIC)
def test_speakers_may_be_mixed(name: LossName, embeddings: Tensor, speakers: Tensor) -> None:
    loss = loss_of(name)
    mixed = torch.arange(SPEAKERS * UTTERANCES).view(SPEAKERS, UTTERANCES).T.flatten()
    found = loss(loss.head, embeddings[mixed], speakers[mixed])
    torch.testing.assert_close(found, loss(loss.head, embeddings, speakers))


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
        speaker_losses.build(name, dimensions=8, speakers=5, utterances=1, margin=0.2, scale=30.0)


# -------------------------------------------------------------------------------------------------- over the ranks

NAMES: tuple[LossName, ...] = (*METRIC, "aamsoftmax")
# Not to be divided evenly among 2 or 3 ranks: 9 utterances of 3 speakers, and all 15.
BATCHES = [[0, 5, 10, 2, 7, 12, 4, 9, 14], [0, 5, 10, 1, 6, 11, 2, 7, 12, 3, 8, 13, 4, 9, 14]]


def waveforms() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    samples = torch.randn(SPEAKERS * UTTERANCES, 2400, generator=generator, dtype=torch.float64)
    return TensorDataset(samples, torch.arange(SPEAKERS * UTTERANCES) % SPEAKERS)


def network() -> speaker_model.SpeakerNet:
    torch.manual_seed(0)
    return speaker_model.build("resnetse10")


def alone() -> dict[str, list[Tensor]]:
    """Return the gradients of both batches with torch alone, for every loss."""
    samples, speakers = waveforms().tensors
    found: dict[str, list[Tensor]] = {}
    for name in NAMES:
        model, loss = network().double(), loss_of(name, 128)
        loss.head.double()
        parameters = [*model.parameters(), *loss.head.parameters()]
        for batch in BATCHES:
            total = loss(loss.head, model(samples[batch]), speakers[batch])
            found.setdefault(name, []).extend(torch.autograd.grad(total, parameters))
    return found


def over_the_ranks(backend: str) -> dict[str, list[Tensor]]:
    """Return the gradients that the optimizer gets, as in the recipe."""
    settings: dict[str, Any] = {"precision": "fp64", "sync_batchnorm": True, "device": "cpu", "timeout_s": 60}
    found: dict[str, list[Tensor]] = {}
    with unitrain.init(backend=backend, **settings) as strategy:
        for name in NAMES:
            loss = loss_of(name, 128)
            model = network()
            parameters = [*model.parameters(), *loss.head.parameters()]
            optimizer = torch.optim.SGD(parameters, lr=0.0)
            gradients = found.setdefault(name, [])

            def keep(
                *_: Any, parameters: list[torch.nn.Parameter] = parameters, gradients: list[Tensor] = gradients
            ) -> None:
                gradients.extend(p.grad.clone() for p in parameters if p.grad is not None)

            optimizer.register_step_pre_hook(keep)
            prepared, head, optimizer = strategy.prepare(model, loss.head, optimizer)
            loader = strategy.dataloader(waveforms(), batch_sampler=BATCHES)
            for samples, speakers in loader:
                embeddings = prepared(samples)
                if loss.compare:
                    rows = strategy.gather((embeddings, speakers), differentiable=True)
                    embeddings, speakers = (in_batch_order(part, strategy.shares) for part in rows)
                    assert speakers.view(-1, UTTERANCES).unique(dim=1).shape[1] == 1, "speakers are next to each other"
                strategy.step(loss(head, embeddings, speakers), optimizer)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Tensor]]:
    return alone()


@pytest.mark.parametrize(
    ("backend", "launcher", "nprocs"),
    [
        ("ddp", "spawn", 2),
        pytest.param("horovod", "horovodrun", 2, marks=[needs.HOROVOD, pytest.mark.all("a recipe on Horovod")]),
        pytest.param("ddp", "spawn", 3, marks=pytest.mark.all("more ranks")),
        pytest.param("horovod", "horovodrun", 3, marks=[needs.HOROVOD, pytest.mark.soak]),
    ],
)
def test_gradients_are_those_of_one_process(
    expected: dict[str, list[Tensor]], backend: str, launcher: Any, nprocs: int
) -> None:
    for found in run_ranks(over_the_ranks, backend, nprocs=nprocs, launcher=launcher, timeout=120):
        for name in NAMES:
            assert len(found[name]) == len(expected[name])
            for one, other in zip(found[name], expected[name], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
