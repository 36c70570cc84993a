"""The speaker recogniser in one process: it trains classifiers, too, and what can't be is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recipe_runs import run_recipe

from unitrain import ConfigError
from unitrain.recipes.speaker_verification import synthesis as speaker_synthesis

SMALL = (
    "--data=voxceleb:speech", "--seconds=0.2", "--test-seconds=0.2", "--test-crops=2", "--batch-size=6", "--epochs=2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with speech."""
    monkeypatch.chdir(tmp_path)
    speaker_synthesis.make(Path("speech"), train=(4, 9), test=(4, 3))


@pytest.mark.parametrize("loss", ["softmax", "aamsoftmax"])
def test_classifiers_train_with_one_utterance_per_speaker(loss: str) -> None:
    flags = f"--loss={loss} --utterances-per-speaker=1 --batch-size=4 --max-steps=2".split()
    assert [line["step"] for line in run_recipe("speaker", *SMALL, *flags)] == [0, 2]
    assert torch.load("out/model.pt", weights_only=True).keys() >= {"fc.weight", "pool.hidden.weight"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--strategy.accumulate 2", "loss angleproto compares all speakers of a batch: set strategy.accumulate to 1"),
        ("--data voxceleb", "--data is 'voxceleb', but must be synthetic or voxceleb:PATH"),
        ("--loss triplet", "--loss is 'triplet', but must be softmax, amsoftmax"),
    ],
)
def test_what_can_not_be_is_refused(flags: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_recipe("speaker", *SMALL, *flags.split())
    assert not Path("out").exists()
