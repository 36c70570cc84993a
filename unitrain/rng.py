"""Random numbers: what all ranks draw alike, what each rank and each sample draws for itself, and generators' states.

Python's, numpy's and torch's generators are seeded together. A sample's random numbers follow from (seed, epoch,
sample) alone: it looks the same in whichever process, worker or batch it is read, and after a resume.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    """Seed python's, numpy's and torch's CPU generator with 64 bits; torch.manual_seed would take ten times as long."""
    random.seed(seed)
    # Both of these are Mersenne Twisters that use 32 bits of a seed: of the same 32, they would draw the same.
    np.random.seed(seed >> 32)
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Leave the process's own generators as they were (77 µs of CPU time on one core)."""
    states = _states()
    try:
        yield
    finally:
        _restore(states)


class SeparateGenerators:
    """A second set of python's, numpy's and torch's states, which goes on where it was left.

    Args:
        seed: where it begins.
    """

    def __init__(self, seed: int) -> None:
        with generators_restored():
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


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


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
