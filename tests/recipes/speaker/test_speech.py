"""Speech in VoxCeleb's layout: lists, crops of wav files, and the synthetic set."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from unitrain.errors import ConfigError, DataError
from unitrain.recipes.speaker_verification import speech
from unitrain.recipes.speaker_verification import synthesis as speaker_synthesis

LISTS = (Path("train_list.txt"), Path("test_list.txt"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small set: 2 speakers with 3 utterances each, and 2 others for trials."""
    speaker_synthesis.make(tmp_path / "speech", train=(2, 3), test=(2, 2))
    return tmp_path / "speech"


def load(folder: Path) -> speech.Speech:
    return speech.load(f"voxceleb:{folder}", Path("unused"), *LISTS)


def wav(samples: Any, path: Path, rate: int = speech.SAMPLE_RATE) -> Path:
    wavfile.write(path, rate, np.asarray(samples))
    return path


def test_lists_name_utterances_and_trials(folder: Path) -> None:
    data = load(folder)
    assert [file.relative_to(folder / "voxceleb2").as_posix() for file in data.files[:2]] == [
        "id00000/video0/00000.wav",
        "id00000/video0/00001.wav",
    ]
    assert data.speakers == (0, 0, 0, 1, 1, 1)
    assert len(data.trials.files) == len(set(data.trials.files)) == 4
    of = [data.trials.files[i].parts[-3] for i in range(4)]
    for first, second, same in zip(data.trials.first, data.trials.second, data.trials.same, strict=True):
        assert (of[first] == of[second]) == same
    assert (int(data.trials.same.sum()), int((~data.trials.same).sum())) == (2, 8)


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (without("train_list.txt"), "list .*train_list.txt can't be read: .*No such file.*lines SPEAKER PATH"),
        (without("test_list.txt"), "list .*test_list.txt can't be read: .*lines LABEL PATH PATH"),
        (written("test_list.txt", "\n"), "list .*test_list.txt is empty"),
        (written("train_list.txt", "id00000\n"), "train_list.txt, line 1 is 'id00000', but must be SPEAKER PATH"),
        (written("test_list.txt", "\nyes a b\n"), "test_list.txt, line 2: the label is 'yes', but must be 1"),
        (
            written("test_list.txt", "1 id00002/video0/00000.wav id00002/video0/00001.wav\n"),
            "has only trials with label 1",
        ),
        (without("voxceleb2/id00001/video0/00002.wav"), "1 of the 6 files named in .*train_list.txt don't exist, the"),
        (without("voxceleb1/id00003/video0/00001.wav"), r"1 of the 4 .*test_list.txt.*id00003/video0/00001\.wav"),
    ],
)
def test_a_wrong_list_is_one_message(folder: Path, harm: Callable[[Path], object], said: str) -> None:
    harm(folder)
    with pytest.raises(ConfigError, match=said):
        load(folder)


def test_crops_for_training_are_random_parts(tmp_path: Path) -> None:
    file = wav(np.arange(20_000, dtype=np.int16), tmp_path / "ramp.wav")
    crops = speech.TrainingCrops([file], [7], seconds=1)
    torch.manual_seed(0)
    starts = []
    for _ in range(20):
        samples, speaker = crops[0]
        assert (samples.dtype, samples.shape, speaker) == (torch.float32, (16_000,), 7)
        start = round(float(samples[0]) * 32768)
        assert torch.equal(samples, torch.arange(start, start + 16_000) / 32768)
        starts.append(start)
    assert len(set(starts)) > 15
    assert 0 <= min(starts) < 1000
    assert 3000 < max(starts) <= 4000


def test_crops_for_trials_are_evenly_spaced(tmp_path: Path) -> None:
    file = wav(np.arange(20_000, dtype=np.int16), tmp_path / "ramp.wav")
    samples = speech.TrialCrops([file], seconds=1, crops=3)[0]
    assert samples.shape == (3, 16_000)
    assert (samples[:, 0] * 32768).tolist() == [0, 2000, 4000]
    samples = speech.TrialCrops([file], seconds=1, crops=1)[0]
    assert samples.shape == (1, 16_000)


def test_a_short_utterance_is_repeated(tmp_path: Path) -> None:
    file = wav(np.arange(1000, dtype=np.int16), tmp_path / "short.wav")
    samples, _ = speech.TrainingCrops([file], [0], seconds=1)[0]
    assert torch.equal(samples, (torch.arange(16_000) % 1000) / 32768)


def test_metadata_in_a_file_is_skipped(tmp_path: Path) -> None:
    file = wav(np.arange(16_000, dtype=np.int16), tmp_path / "a.wav")
    content = file.read_bytes()
    chunk = b"odd " + struct.pack("<I", 4) + b"text"
    file.write_bytes(content[:4] + struct.pack("<I", len(content) - 8 + len(chunk)) + content[8:] + chunk)
    assert speech.TrainingCrops([file], [0], seconds=1)[0][0][5] == 5 / 32768


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: wav(np.zeros(9000, np.int16), path, rate=8000), "of int16 at 8000 Hz in 1 channels, but must"),
        (lambda path: wav(np.zeros((9000, 2), np.int16), path), "in 2 channels, but must .* ffmpeg"),
        (lambda path: wav(np.zeros(9000, np.float32), path), "9000 samples of float32"),
        (lambda path: wav(np.zeros(0, np.int16), path), "has 0 samples"),
        (lambda path: path.write_text("no sound"), "can't be read as a wav file"),
        (lambda path: path.write_bytes(b""), "can't be read as a wav file"),
    ],
)
def test_a_file_that_can_not_be_used_is_named(tmp_path: Path, make: Callable[[Path], object], said: str) -> None:
    path = tmp_path / "a.wav"
    make(path)
    with pytest.raises(DataError, match=rf"a\.wav .*{said}"):
        speech.TrainingCrops([path], [0], seconds=1)[0]


def test_a_fingerprint_is_of_names_and_speakers_and_not_of_the_folder() -> None:
    def of(*files: str, speakers: tuple[int, ...] = (0, 1)) -> str:
        found: str = speech.TrainingCrops([Path(file) for file in files], speakers, seconds=1).fingerprint
        return found

    first = of("/here/a/b/1.wav", "/here/a/b/2.wav")
    assert of("/there/a/b/1.wav", "/there/a/b/2.wav") == first
    assert of("/here/a/b/2.wav", "/here/a/b/1.wav") != first
    assert of("/here/a/b/1.wav", "/here/a/b/2.wav", speakers=(0, 0)) != first


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = b"".join(path.relative_to(folder).as_posix().encode() + path.read_bytes() for path in files)
    return hashlib.sha256(named).hexdigest()


def test_it_is_made_once_and_always_the_same(folder: Path, tmp_path: Path) -> None:
    speaker_synthesis.make(tmp_path / "again", train=(2, 3), test=(2, 2))
    assert digest(tmp_path / "again") == digest(folder)
    marked = folder / "voxceleb2" / "mark"
    marked.touch()
    speaker_synthesis.make(folder)
    assert marked.exists()
    assert len(list(folder.rglob("*.wav"))) == 10


def test_a_folder_that_can_not_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"can't be written to .*file/synthetic-speech-1: .*another --data-dir"):
        speech.load("synthetic", tmp_path / "file", *LISTS)


def test_a_set_that_was_not_finished_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wavfile, "write", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        speaker_synthesis.make(tmp_path / "speech", train=(1, 1), test=(2, 1))
    assert list(tmp_path.iterdir()) == []
