"""Random numbers: what all ranks draw alike, what each rank and each sample draws for itself, and generators' states.

Python's, numpy's and torch's generators are seeded together. A sample's random numbers follow from (seed, epoch,
sample) alone: it looks the same in whichever process, worker or batch it is read, and after a resume.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def seed_all(seed: int) -> None:
    """Seed python, numpy and torch. ``init`` does so alike on every rank: models and random splits come out equal."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_rank(*words: int) -> None:
    """Seed python, numpy and torch from several numbers, of which a rank is one, so that ranks draw apart."""
    seed_all(int(np.random.SeedSequence(words).generate_state(1)[0]))


def derived_seed(*parts: object) -> int:
    """Return 64 bits that follow from ``parts``, which are told apart by their text."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def sample_seeds(
    seed: int, epoch: int, samples: NDArray[np.int64], positions: NDArray[np.int64] | None = None
) -> list[int]:
    """Return 64 bits for each sample.

    Args:
        seed: the run's.
        epoch: in which the samples are read.
        samples: their indices.
        positions: where in the epoch each is read, for orders in which a sample may come twice.
    """
    mixed = _mixed(samples, derived_seed("sample", seed, epoch))
    if positions is not None:
        mixed = _mixed(mixed + positions.astype(np.uint64), derived_seed("position", seed, epoch))
    seeds: list[int] = mixed.tolist()
    return seeds


def _mixed(values: NDArray[np.int64] | NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, twice the key: neighbouring values share nothing afterwards."""
    mixed: NDArray[np.uint64] = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        key
    )
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MULTIPLIERS[1]
    mixed ^= mixed >> np.uint64(31)
    return mixed


def seed_generators(seed: int) -> None:
    """Seed python's, numpy's and torch's CPU generator with 64 bits."""
    seed_python(seed)
    seed_numpy(seed)
    seed_torch(seed)


def seed_python(seed: int) -> None:
    """Seed python's generator with 64 bits, as ``seed_generators`` does (4 µs)."""
    random.seed(seed)


def seed_numpy(seed: int) -> None:
    """Seed numpy's generator with half of 64 bits, as ``seed_generators`` does (2 µs)."""
    np.random.seed(seed >> 32)


def seed_torch(seed: int) -> None:
    """Seed torch's CPU generator as ``seed_generators`` does (1 µs; ``torch.manual_seed`` takes 80)."""
    # The other half: numpy's is a Mersenne Twister of 32 bits as well, and of the same 32 would draw the same.
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Leave the process's own generators as they were. What is drawn within must be seeded first (50 µs)."""
    states = _states()
    numpys = _SPARE.pop() if _SPARE else np.random.MT19937()
    np.random.set_bit_generator(numpys)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _restore(states)
        _SPARE.append(numpys)


# Bit generators for numpy while its own are put aside: to make one takes 80 µs.
_SPARE: list[np.random.MT19937] = []


class SeparateGenerators:
    """A second set of python's, numpy's and torch's states, which goes on where it was left.

    Args:
        seed: where it begins.
    """

    def __init__(self, seed: int) -> None:
        with generators_restored():
            np.random.set_bit_generator(np.random.MT19937())  # type: ignore[attr-defined]
            seed_generators(seed)
            self._own = _states()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Draw from these, and leave the process's own as they were."""
        with generators_restored():
            _restore(self._own)
            try:
                yield
            finally:
                self._own = _states()


class _States(NamedTuple):
    """Of the process's generators, at one moment."""

    python: tuple[Any, ...]
    numpy: Any
    """The bit generator itself, which is put aside whole: to copy its state back takes 40 µs."""
    numpy_legacy: dict[str, Any]
    torch: torch.Tensor


def _states() -> _States:
    numpys = np.random.get_bit_generator()  # type: ignore[attr-defined]
    legacy = np.random.get_state(legacy=False)
    return _States(random.getstate(), numpys, legacy, torch.default_generator.get_state())


def _restore(states: _States) -> None:
    random.setstate(states.python)
    np.random.set_bit_generator(states.numpy)  # type: ignore[attr-defined]
    # Normal numbers are drawn in pairs, and the second is kept outside of the bit generator.
    if states.numpy_legacy["has_gauss"]:
        np.random.set_state(states.numpy_legacy)
    torch.default_generator.set_state(states.torch)


def capture() -> dict[str, Any]:
    """Return the states of python's, numpy's and torch's generators, those of GPUs where this process uses any."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [torch.cuda.get_rng_state(device) for device in _gpus()]
    return state


def restore(state: dict[str, Any]) -> None:
    """Put the generators back into states that ``capture`` returned, those of GPUs as far as there are as many now."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device, its in zip(_gpus(), state.get("cuda", ()), strict=False):
            torch.cuda.set_rng_state(its, device)


def _gpus() -> list[int]:
    """Return the visible GPUs, the current one first: a rank's own, which may have another number after a resume."""
    current, count = torch.cuda.current_device(), torch.cuda.device_count()
    return [(current + i) % count for i in range(count)]
