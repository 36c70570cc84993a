"""``SpeakerBatches``: a batch sampler of utterances by speaker."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from unitrain import ConfigError


class SpeakerBatches(Sampler[list[int]]):
    """Yields global batches: ``utterances`` utterances of each of ``batch_size / utterances`` different speakers.

    In an epoch, no utterance comes twice. Speakers are drawn at random, those with more utterances more often. There
    are as many batches as can be filled, the same number in every epoch. Random numbers are torch's: UniTrain's loader
    seeds them by seed and epoch, so that every rank gets the same batches.

    Args:
        speakers: the speaker of each utterance of the dataset.
        batch_size: utterances in a batch.
        utterances: utterances of each speaker in a batch; they are next to each other.
        most: at most so many utterances of a speaker in an epoch.

    Raises:
        ConfigError: ``batch_size`` is no multiple of ``utterances``, or not one batch can be filled.
    """

    def __init__(self, speakers: Sequence[int], batch_size: int, utterances: int, most: int) -> None:
        if batch_size % utterances:
            raise ConfigError(
                f"the batch size is {batch_size}, but must be a multiple of {utterances}, the utterances per speaker."
            )
        self._utterances = utterances
        self._speakers_per_batch = batch_size // utterances
        by_speaker: dict[int, list[int]] = {}
        for index, speaker in enumerate(speakers):
            by_speaker.setdefault(speaker, []).append(index)
        self._of = [torch.tensor(indices) for indices in by_speaker.values()]
        # The groups of utterances that each speaker has for an epoch.
        groups = torch.tensor([min(len(indices), most) // utterances for indices in self._of])
        # A speaker is in a batch at most once: n batches can be filled if speakers suffice, each n times at most.
        enough = range(1, int(groups.sum()) // self._speakers_per_batch + 1)
        self._batches = bisect(enough, 0, key=lambda n: int(groups.clamp(max=n).sum()) < n * self._speakers_per_batch)
        if not self._batches:
            raise ConfigError(
                f"a batch of {batch_size} needs {self._speakers_per_batch} speakers with at least {utterances} "
                f"utterances, but the training set has {int((groups > 0).sum())}: use a smaller batch, or fewer "
                f"utterances per speaker (at most {most} of a speaker are used in an epoch)."
            )
        self._groups = groups.clamp(max=self._batches)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of an epoch."""
        size = self._speakers_per_batch
        # The groups that fill all batches, and the utterances of each speaker in random order.
        everyone = torch.arange(len(self._groups)).repeat_interleave(self._groups)
        kept = everyone[torch.randperm(len(everyone))[: self._batches * size]]
        left = torch.bincount(kept, minlength=len(self._groups))
        queues = [iter(indices[torch.randperm(len(indices))].tolist()) for indices in self._of]
        for batches_left in range(self._batches, 0, -1):
            # The smallest of n exponential draws is a draw of rate n (Efraimidis and Spirakis 2006): speakers are drawn
            # by the number of their groups. Who has as many groups as there are batches left must be in each.
            keys = torch.empty(len(left)).exponential_() / left
            keys[left == batches_left] = -1
            drawn = keys.topk(size, largest=False).indices
            drawn = drawn[torch.randperm(size)]
            left[drawn] -= 1
            yield [next(queues[speaker]) for speaker in drawn.tolist() for _ in range(self._utterances)]
