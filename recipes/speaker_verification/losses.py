"""Losses for speaker embeddings: of each utterance by itself, and of all speakers of a batch against each other.

Each is the cross-entropy of what its head returns. The head has the parameters that are trained with the network. It
treats rows independently, so that it may be split as the network is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unitrain import ConfigError

LossName = Literal["softmax", "amsoftmax", "aamsoftmax", "proto", "angleproto", "ge2e"]


@dataclass(frozen=True)
class SpeakerLoss:
    """A loss of speaker embeddings."""

    head: nn.Module
    """Called with rows and the right answer for each, it returns logits. Prepare it like the network."""
    compare: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """Makes rows and right answers of embeddings (speakers, utterances, dimensions); None if they are the embeddings
    and their speakers. If given, the loss is that of a batch as a whole, which must be the global one: with only the
    speakers of one process, another number of processes would train another network."""
    utterances: int = 1
    """Utterances of a speaker in a batch, for ``compare``."""

    def __call__(self, head: nn.Module, embeddings: Tensor, speakers: Tensor) -> Tensor:
        """Return the mean loss.

        Args:
            head: what ``prepare`` returned for ``head``.
            embeddings: of each utterance (rows, dimensions).
            speakers: the speaker of each (rows,).
        """
        if self.compare is not None:
            by_speaker = embeddings[speakers.argsort(stable=True)].view(-1, self.utterances, embeddings.shape[1])
            embeddings, speakers = self.compare(by_speaker)
        return F.cross_entropy(head(embeddings, speakers), speakers)


def build(
    name: LossName, *, dimensions: int, speakers: int, utterances: int, margin: float, scale: float
) -> SpeakerLoss:
    """Return a loss.

    Args:
        name: softmax: a linear layer with an output for each speaker of the training set.
            amsoftmax and aamsoftmax: ``CosineMargin`` and ``AngleMargin``.
            proto: the prototypical loss of Snell et al., "Prototypical networks for few-shot learning" (NeurIPS 2017),
            with one query for each speaker, as in Chung et al. 2020.
            angleproto: the angular prototypical loss of Chung et al., "In defence of metric learning for speaker
            recognition" (Interspeech 2020).
            ge2e: the softmax variant of Wan et al., "Generalized end-to-end loss for speaker verification" (ICASSP
            2018).
        dimensions: length of an embedding.
        speakers: number of speakers in the training set.
        utterances: utterances of a speaker in a batch.
        margin: margin of amsoftmax and aamsoftmax.
        scale: factor of the cosine in amsoftmax and aamsoftmax.

    Raises:
        ConfigError: the loss compares utterances of a speaker, and there is one.
    """
    if name == "softmax":
        return SpeakerLoss(Linear(dimensions, speakers))
    if name == "amsoftmax":
        return SpeakerLoss(CosineMargin(dimensions, speakers, margin, scale))
    if name == "aamsoftmax":
        return SpeakerLoss(AngleMargin(dimensions, speakers, margin, scale))
    if utterances < 2:
        raise ConfigError(
            f"loss {name} compares the utterances of a speaker, and needs at least 2 utterances per speaker, not "
            f"{utterances}."
        )
    if name == "proto":
        return SpeakerLoss(Unchanged(), query_distances, utterances)
    return SpeakerLoss(ScaleAndOffset(), query_cosines if name == "angleproto" else all_cosines, utterances)


# ------------------------------------------------------------------------------------------------------- comparisons


def query_distances(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Return minus the squared distances of each speaker's last utterance to each speaker's mean of the others."""
    queries, prototypes = embeddings[:, -1], embeddings[:, :-1].mean(1)
    return -(queries.unsqueeze(1) - prototypes).square().sum(2), _places(embeddings)


def query_cosines(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines of each speaker's last utterance with each speaker's mean of the others."""
    queries, prototypes = embeddings[:, -1], embeddings[:, :-1].mean(1)
    return F.linear(F.normalize(queries), F.normalize(prototypes)), _places(embeddings)


def all_cosines(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines of each utterance with each speaker's mean, from which its own speaker's leaves it out."""
    utterances = embeddings.shape[1]
    places = _places(embeddings).repeat_interleave(utterances)
    others = (embeddings.sum(1, keepdim=True) - embeddings) / (utterances - 1)
    own = F.cosine_similarity(embeddings, others, dim=2).flatten()
    cosines = F.linear(F.normalize(embeddings.flatten(0, 1)), F.normalize(embeddings.mean(1)))
    return torch.where(F.one_hot(places, len(embeddings)).bool(), own.unsqueeze(1), cosines), places


def _places(embeddings: Tensor) -> Tensor:
    return torch.arange(len(embeddings), device=embeddings.device)


# ------------------------------------------------------------------------------------------------------------- heads


class Unchanged(nn.Module):
    """Returns what it is given."""

    def forward(self, rows: Tensor, answers: Tensor) -> Tensor:
        """Return the rows."""
        return rows


class ScaleAndOffset(nn.Module):
    """Multiplies cosines by a scale and adds an offset, both learnt; from 10 and -5 on, as in Wan et al. 2018."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: nn.Parameter = nn.Parameter(torch.tensor(10.0))
        self.offset: nn.Parameter = nn.Parameter(torch.tensor(-5.0))

    def forward(self, rows: Tensor, answers: Tensor) -> Tensor:
        """Return the logits of cosines."""
        return self.scale.clamp(min=1e-6) * rows + self.offset


class Linear(nn.Module):
    """A linear layer."""

    def __init__(self, dimensions: int, speakers: int) -> None:
        super().__init__()
        self.fc: nn.Linear = nn.Linear(dimensions, speakers)

    def forward(self, rows: Tensor, answers: Tensor) -> Tensor:
        """Return the logits of embeddings."""
        return cast(Tensor, self.fc(rows))


class CosineMargin(nn.Module):
    """Additive margin softmax: a margin is subtracted from the cosine with the right speaker.

    Wang et al., "Additive margin softmax for face verification" (2018); Wang et al., "CosFace" (CVPR 2018).
    """

    def __init__(self, dimensions: int, speakers: int, margin: float, scale: float) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(nn.init.xavier_normal_(torch.empty(speakers, dimensions)))
        self.margin: float = margin
        self.scale: float = scale

    def with_margin(self, cosines: Tensor) -> Tensor:
        """Return what stands for a cosine with the right speaker."""
        return cosines - self.margin

    def forward(self, rows: Tensor, answers: Tensor) -> Tensor:
        """Return the logits of embeddings."""
        cosines = F.linear(F.normalize(rows), F.normalize(self.weight))
        right = F.one_hot(answers, cosines.shape[1]).bool()
        return self.scale * torch.where(right, self.with_margin(cosines), cosines)


class AngleMargin(CosineMargin):
    """Additive angular margin softmax: a margin is added to the angle to the right speaker.

    Deng et al., "ArcFace: additive angular margin loss for deep face recognition" (CVPR 2019). As in its authors' code,
    where the angle with the margin would exceed pi, the cosine is lowered instead, since it would rise again.
    """

    def with_margin(self, cosines: Tensor) -> Tensor:
        """Return the cosine of the angle plus the margin."""
        # At 0, the square root has an infinite gradient.
        sines = (1 - cosines.square()).clamp(min=1e-12).sqrt()
        wider = cosines * math.cos(self.margin) - sines * math.sin(self.margin)
        return torch.where(cosines < -math.cos(self.margin), cosines - self.margin * math.sin(self.margin), wider)
