"""The batch sampler of the speaker recogniser."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unitrain.errors import ConfigError
from unitrain.recipes.speaker_verification.batches import SpeakerBatches

# The utterances of speakers 0 to 6: 1 to 40.
COUNTS = (1, 2, 5, 6, 8, 11, 40)
SPEAKERS = [speaker for speaker, count in enumerate(COUNTS) for _ in range(count)]


@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    per_batch=st.integers(1, 4),
    utterances=st.integers(1, 3),
    most=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_what_holds_for_every_epoch(counts: list[int], per_batch: int, utterances: int, most: int, seed: int) -> None:
    speakers = [speaker for speaker, count in enumerate(counts) for _ in range(count)]
    groups = [min(count, most) // utterances for count in counts]
    # As many batches as can be filled: what is left after any more of them is too little for one of different speakers.
    possible = max(n for n in range(sum(groups) + 1) if sum(min(g, n) for g in groups) >= n * per_batch)
    if not possible:
        with pytest.raises(ConfigError, match=rf"needs {per_batch} speakers with at least {utterances} utterances"):
            SpeakerBatches(speakers, per_batch * utterances, utterances, most)
        return
    sampler = SpeakerBatches(speakers, per_batch * utterances, utterances, most)
    torch.manual_seed(seed)
    batches = list(sampler)
    assert len(batches) == len(sampler) == possible
    for batch in batches:
        of = [speakers[index] for index in batch]
        assert len(batch) == per_batch * utterances
        assert len(set(of)) == per_batch
        assert all(len(set(of[i : i + utterances])) == 1 for i in range(0, len(of), utterances))
    used = list(chain.from_iterable(batches))
    assert len(set(used)) == len(used)
    assert max(Counter(speakers[index] for index in used).values()) <= most


def test_a_batch_is_a_multiple_of_the_utterances_per_speaker() -> None:
    with pytest.raises(ConfigError, match="the batch size is 7, but must be a multiple of 2, the utterances per spe"):
        SpeakerBatches(SPEAKERS, 7, 2, 500)
