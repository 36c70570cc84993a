"""Speech for the speaker recogniser, in VoxCeleb's layout: lists of files, and crops of them as samples.

SciPy is imported in the function that needs it, since that takes as long as importing torch.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from unitrain import ConfigError, DataError

SAMPLE_RATE = 16_000

DataName = Annotated[
    str,
    Field(pattern=r"^(synthetic|voxceleb:.+)$", json_schema_extra={"allowed": "synthetic or voxceleb:PATH"}),
]
"""A name that ``load`` accepts."""


class Trials(NamedTuple):
    """Pairs of utterances, and whether both are of one speaker."""

    files: tuple[Path, ...]
    """The utterances, each once."""
    first: NDArray[np.int64]
    """For each trial, the place of one utterance in ``files``."""
    second: NDArray[np.int64]
    """For each trial, the place of the other."""
    same: NDArray[np.bool_]
    """For each trial, whether the speaker is the same."""


class Speech(NamedTuple):
    """Utterances for training, and trials for testing."""

    files: tuple[Path, ...]
    """The training utterances."""
    speakers: tuple[int, ...]
    """The speaker of each, from 0 on."""
    trials: Trials


def load(name: str, data_dir: Path, train_list: Path, trial_list: Path) -> Speech:
    """Read the lists of a data set, and check that the files exist. The synthetic set is made if it is not there.

    Args:
        name: a ``DataName``.
        data_dir: the folder of the synthetic set.
        train_list: lines ``SPEAKER PATH``, with paths in voxceleb2/; relative to the data set's folder.
        trial_list: lines ``1 PATH PATH`` (one speaker) or ``0 PATH PATH``, with paths in voxceleb1/; likewise.

    Raises:
        ConfigError: a list or a file of a list is missing, or a line is malformed.
    """
    root = Path(name.partition(":")[2])
    if name == "synthetic":
        from unitrain.recipes.speaker_verification import synthesis as speaker_synthesis

        root = data_dir / speaker_synthesis.FOLDER
        speaker_synthesis.make(root)
    files, speakers = _read_train_list(root / train_list, root / "voxceleb2")
    return Speech(files, speakers, _read_trials(root / trial_list, root / "voxceleb1"))


def _read_train_list(file: Path, folder: Path) -> tuple[tuple[Path, ...], tuple[int, ...]]:
    lines = [fields for _, fields in _lines(file, "SPEAKER PATH")]
    paths = tuple(folder / path for _, path in lines)
    _check_files(paths, file)
    number = {speaker: i for i, speaker in enumerate(sorted({speaker for speaker, _ in lines}))}
    return paths, tuple(number[speaker] for speaker, _ in lines)


def _read_trials(file: Path, folder: Path) -> Trials:
    lines = list(_lines(file, "LABEL PATH PATH"))
    for line, (label, *_) in lines:
        if label not in ("0", "1"):
            raise ConfigError(
                f"{file}, line {line}: the label is {label!r}, but must be 1 (one speaker) or 0 (two speakers)."
            )
    same = np.array([label == "1" for _, (label, *_) in lines])
    if same.all() or not same.any():
        raise ConfigError(
            f"{file} has only trials with label {int(same[0])}: error rates need trials of one speaker (1) and of two "
            "(0)."
        )
    place = {path: i for i, path in enumerate(dict.fromkeys(path for _, (_, *pair) in lines for path in pair))}
    paths = tuple(folder / path for path in place)
    _check_files(paths, file)
    first, second = (np.array([place[fields[i]] for _, fields in lines]) for i in (1, 2))
    return Trials(paths, first, second, same)


def _lines(file: Path, form: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the fields of each line that is not empty."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the list {file} can't be read: {error}. It must have lines {form}; --data voxceleb:PATH also expects the "
            "utterances in PATH/voxceleb2 (for training) and PATH/voxceleb1 (for trials)."
        ) from None
    if not text.strip():
        raise ConfigError(f"the list {file} is empty: it must have lines {form}.")
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        if fields and len(fields) != len(form.split()):
            raise ConfigError(f"{file}, line {number} is {line!r}, but must be {form}.")
        if fields:
            yield number, fields


def _check_files(paths: Sequence[Path], listed_in: Path) -> None:
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise ConfigError(
            f"{len(missing)} of the {len(paths)} files named in {listed_in} don't exist, the first is {missing[0]}. "
            "Unpack or convert the rest of the data set, or remove their lines."
        )


class TrainingCrops(Dataset[tuple[Tensor, int]]):
    """Utterances for training: a sample is a random crop and the number of its speaker.

    Args:
        files: the utterances.
        speakers: the speaker of each.
        seconds: length of a crop; shorter utterances are repeated.

    Attributes:
        fingerprint: changes with the files or their speakers.
    """

    def __init__(self, files: Sequence[Path], speakers: Sequence[int], seconds: float) -> None:
        self._files = files
        self._speakers = speakers
        self._length = round(seconds * SAMPLE_RATE)
        # The last parts of a path: the data set may be in another folder when a run is resumed.
        named = "\n".join(f"{s} {'/'.join(f.parts[-3:])}" for s, f in zip(speakers, files, strict=True))
        self.fingerprint: str = hashlib.sha256(named.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        samples = _read(self._files[index], self._length)
        start = int(torch.randint(len(samples) - self._length + 1, ()))
        return _as_floats(samples[start : start + self._length]), self._speakers[index]


class TrialCrops(Dataset[Tensor]):
    """Utterances of trials: a sample has evenly spaced crops of one (crops, samples).

    Args:
        files: the utterances.
        seconds: length of a crop; shorter utterances are repeated.
        crops: number of crops.
    """

    def __init__(self, files: Sequence[Path], seconds: float, crops: int) -> None:
        self._files = files
        self._length = round(seconds * SAMPLE_RATE)
        self._crops = crops

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Tensor:
        samples = _read(self._files[index], self._length)
        starts = np.linspace(0, len(samples) - self._length, self._crops).round().astype(int)
        return torch.stack([_as_floats(samples[start : start + self._length]) for start in starts])


def _read(file: Path, at_least: int) -> NDArray[np.int16]:
    """Return the samples of a file, repeated until there are enough."""
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # chunks of metadata
            rate, samples = wavfile.read(file, mmap=True)  # only the crop is read from the disk
    except (OSError, ValueError) as error:
        raise DataError(f"{file} can't be read as a wav file: {error}") from None
    if rate != SAMPLE_RATE or samples.ndim != 1 or samples.dtype != np.int16 or not len(samples):
        raise DataError(
            f"{file} has {len(samples)} samples of {samples.dtype} at {rate} Hz in "
            f"{1 if samples.ndim == 1 else samples.shape[1]} channels, but must have 16-bit samples at {SAMPLE_RATE} "
            f"Hz in one channel: convert it with ffmpeg -i INPUT -ac 1 -ar {SAMPLE_RATE} -c:a pcm_s16le OUTPUT."
        )
    whole: NDArray[np.int16] = samples
    return whole if len(whole) >= at_least else np.resize(whole, at_least)


def _as_floats(samples: NDArray[np.int16]) -> Tensor:
    """Return samples between -1 and 1."""
    return torch.from_numpy(samples.astype(np.float32) / 32768)
