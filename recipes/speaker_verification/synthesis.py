"""A synthetic speech set: speakers differ in pitch, vocal tract and voice quality, utterances in all else.

Speech is made as by Klatt ("Software for a cascade/parallel formant synthesizer", JASA 67, 1980): pulses of the vocal
folds, or noise, pass through a cascade of resonators, the formants. Vowels have the formants of Peterson and Barney
("Control methods used in a study of the vowels", JASA 24, 1952), scaled to the length of the speaker's vocal tract.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unitrain import ConfigError
from unitrain.recipes.speaker_verification.speech import SAMPLE_RATE

FOLDER = "synthetic-speech-1"  # another number for another set: what was made before is used again
IMPOSTORS = 20  # trials of each utterance with another speaker's
SECONDS = 1.5
# The first three formants of men in heed, head, hod, hawed and who'd, in Hz.
_VOWELS = ((270, 2290, 3010), (530, 1840, 2480), (730, 1090, 2440), (570, 840, 2410), (300, 870, 2240))


class _Voice(NamedTuple):
    """What stays the same in all utterances of a speaker."""

    pitch: float
    """Mean frequency of the vocal folds, in Hz."""
    formants: NDArray[np.float64]
    """Factors of the four formants."""
    softness: float
    """Pole of the lowpass filter of the glottis: the closer to 1, the softer the voice."""
    breath: float
    """Share of noise in vowels."""
    rate: float
    """Sounds per second."""
    melody: float
    """How far the pitch moves, in octaves."""


def make(folder: Path, *, train: tuple[int, int] = (250, 4), test: tuple[int, int] = (30, 6)) -> None:
    """Write the set to ``folder`` in VoxCeleb's layout, unless it is there. It does not depend on the seed.

    Args:
        folder: is made.
        train: number of speakers to train on, and of utterances of each.
        test: the same for trials, which have other speakers.

    Raises:
        ConfigError: the folder can't be written to.
    """
    if folder.exists():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        try:
            _write(unfinished, train, test)
            unfinished.chmod(0o755)
            os.rename(unfinished, folder)  # whole or not there
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not folder.exists():  # else another host was first
                raise
    except OSError as error:
        raise ConfigError(
            f"the synthetic speech can't be written to {folder}: {error}. Pass another --data-dir."
        ) from None


def _write(root: Path, train: tuple[int, int], test: tuple[int, int]) -> None:
    listed = [f"{name} {path}\n" for name, path in _write_files(root / "voxceleb2", 0, *train)]
    (root / "train_list.txt").write_text("".join(listed), encoding="utf-8")
    files = _write_files(root / "voxceleb1", train[0], *test)
    trials = [f"1 {one} {other}\n" for (name, one), (of, other) in combinations(files, 2) if name == of]
    draw = np.random.default_rng(0)
    for name, path in files:
        others = [other for of, other in files if of != name]
        trials += [f"0 {path} {other}\n" for other in draw.choice(others, min(IMPOSTORS, len(others)), replace=False)]
    (root / "test_list.txt").write_text("".join(trials), encoding="utf-8")


def _write_files(folder: Path, first: int, speakers: int, utterances: int) -> list[tuple[str, str]]:
    """Write utterances of speakers ``first`` and up, and return the speaker and the path of each."""
    from scipy.io import wavfile

    written = []
    for speaker in range(first, first + speakers):
        name = f"id{speaker:05d}"
        voice = _voice(np.random.default_rng(speaker))
        for number in range(utterances):
            path = f"{name}/video{number // 4}/{number:05d}.wav"
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            samples = _utterance(voice, np.random.default_rng([speaker, number]))
            wavfile.write(folder / path, SAMPLE_RATE, (samples * 32767).astype(np.int16))
            written.append((name, path))
    return written


def _voice(draw: np.random.Generator) -> _Voice:
    pitch = draw.uniform(np.log2(85), np.log2(250))
    # Short vocal tracts have high formants, and mostly go with high voices.
    length = 1 + 0.16 * (pitch - np.log2(146)) + draw.normal(0, 0.09)
    return _Voice(
        pitch=float(2**pitch),
        formants=length * (1 + draw.normal(0, 0.08, 4)),
        softness=draw.uniform(0.75, 0.97),
        breath=draw.uniform(0.01, 0.12),
        rate=draw.uniform(7, 11),
        melody=draw.uniform(0.02, 0.15),
    )


def _utterance(voice: _Voice, draw: np.random.Generator) -> NDArray[np.float64]:
    """Return random sounds of a voice, recorded with a random microphone in a random noise."""
    from scipy.signal import lfilter

    length = int(SECONDS * SAMPLE_RATE)
    source = _source(voice, length, draw)
    speech = np.zeros(length)
    states: list[Any] = [np.zeros(2) for _ in range(4)]
    start = 0
    while start < length:
        stop = min(length, start + int(SAMPLE_RATE / voice.rate * draw.uniform(0.6, 1.6)))
        vowel = np.array([*_VOWELS[draw.integers(len(_VOWELS))], 3500.0])
        formants = vowel * voice.formants * (1 + draw.normal(0, 0.015, 4))
        sound = source[start:stop]
        if draw.random() < 0.15:  # a consonant without voice
            sound = draw.normal(0, 0.3, stop - start)
            formants *= draw.uniform(1.1, 1.5)
        for i, formant in enumerate(np.minimum(formants, 0.45 * SAMPLE_RATE)):
            b, a = _resonator(formant, 50 + 0.04 * formant)
            sound, states[i] = lfilter(b, a, sound, zi=states[i])
        rise = np.minimum(1, np.arange(stop - start) / (0.02 * SAMPLE_RATE))
        speech[start:stop] = sound * rise * rise[::-1] * draw.uniform(0.4, 1)
        start = stop
    # A microphone: a tilt, and a broad peak or dip somewhere.
    speech = lfilter([1, draw.uniform(-0.3, 0.3)], [1], speech)
    b, a = _resonator(draw.uniform(300, 5000), draw.uniform(500, 2000))
    speech = speech / speech.std() + draw.uniform(-0.3, 0.5) * lfilter(b, a, speech / speech.std())
    noise = lfilter([1], [1, -draw.uniform(0, 0.95)], draw.normal(0, 1, length))
    speech = speech / speech.std() + noise / noise.std() * 10 ** (-draw.uniform(20, 40) / 20)
    recorded: NDArray[np.float64] = speech / np.abs(speech).max() * draw.uniform(0.2, 0.9)
    return recorded


def _source(voice: _Voice, length: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """Return the pulses of the vocal folds, with a random melody and breath."""
    from scipy.signal import lfilter

    knots = draw.normal(0, voice.melody, 6) + draw.normal(0, 0.04)
    octaves = np.interp(np.linspace(0, 5, length), np.arange(6), knots) + draw.normal(0, 0.004, length)
    phase = np.cumsum(voice.pitch * 2**octaves / SAMPLE_RATE)
    pulses = np.diff(np.floor(phase), prepend=0.0) - voice.pitch / SAMPLE_RATE
    soft = lfilter([1 - voice.softness], [1, -voice.softness], pulses)
    source: NDArray[np.float64] = soft / soft.std() + draw.normal(0, voice.breath, length)
    return source


def _resonator(frequency: float, bandwidth: float) -> tuple[list[float], list[float]]:
    """Return the coefficients of Klatt's resonator, which has gain 1 at 0 Hz."""
    radius = np.exp(-np.pi * bandwidth / SAMPLE_RATE)
    a = [1.0, -2 * radius * np.cos(2 * np.pi * frequency / SAMPLE_RATE), radius**2]
    return [sum(a)], a
