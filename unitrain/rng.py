"""Random number generators: seeds for all ranks, for each rank and for each sample; saving and restoring states.

Python's, numpy's and torch's generators are seeded together. A sample's random numbers depend on (seed, epoch, sample)
only, and not on the process, worker or batch in which it is read, or on a resume.
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

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def seed_all(seed: int) -> None:
    """Seed python, numpy and torch. ``init`` uses one seed on all ranks, so that models and random splits are equal."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_rank(*words: int) -> None:
    """Seed python, numpy and torch with several ints, one of them the rank, so that ranks draw different numbers."""
    seed_all(int(np.random.SeedSequence(words).generate_state(1)[0]))


def derived_seed(*parts: object) -> int:
    """Return a 64-bit seed that depends on ``parts``, by their ``str()``."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def sample_seeds(
    seed: int, epoch: int, samples: NDArray[np.int64], positions: NDArray[np.int64] | None = None
) -> list[int]:
    """Return a 64-bit seed for each sample that is read in an epoch of a run.

    Args:
        seed: the run's seed.
        epoch: the number of the epoch.
        samples: the indices of the samples.
        positions: their positions in the epoch, where a sample may be repeated; None where it can't be.
    """
    hashes = mixed(samples, derived_seed("sample", seed, epoch))
    if positions is not None:
        hashes = mixed(hashes + positions.astype(np.uint64), derived_seed("position", seed, epoch))
    seeds: list[int] = hashes.tolist()
    return seeds


def mixed(values: NDArray[np.int64] | NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Hash values with a key, by SplitMix64's finaliser, so that the results of neighbours are unrelated, and distinct.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).

    Args:
        values: ints of 64 bits.
        key: an int of 64 bits, which selects the hash function.
    """
    hashes: NDArray[np.uint64] = (values.astype(np.uint64) + np.uint64(1)) * GOLDEN + np.uint64(key)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * MULTIPLIERS[0]
    hashes = (hashes ^ (hashes >> np.uint64(27))) * MULTIPLIERS[1]
    hashes ^= hashes >> np.uint64(31)
    return hashes


def seed_generators(seed: int) -> None:
    """Seed python's, numpy's and torch's CPU generator with a 64-bit seed."""
    seed_python(seed)
    seed_numpy(seed)
    seed_torch(seed)


def seed_python(seed: int) -> None:
    """Seed python's generator, as ``seed_generators`` does (4 µs)."""
    random.seed(seed)


def seed_numpy(seed: int) -> None:
    """Seed numpy's generator with the upper 32 bits, as ``seed_generators`` does (2 µs)."""
    np.random.seed(seed >> 32)


def seed_torch(seed: int) -> None:
    """Seed torch's CPU generator, as ``seed_generators`` does (1 µs; ``torch.manual_seed`` takes 80)."""
    # The lower 32 bits: numpy's generator is a Mersenne Twister, too, and would draw the same numbers from the same.
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the states of the process's generators at the end (60 µs). Seed them inside before drawing."""
    states = _states()
    try:
        yield
    finally:
        _restore(states)


class SeparateGenerators:
    """A second set of states of python's, numpy's and torch's generators, which continues where it was left.

    Args:
        seed: a 64-bit seed for the states.
    """

    def __init__(self, seed: int) -> None:
        with generators_restored():
            seed_generators(seed)
            self._current = _states()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use these states inside, and restore the process's own at the end."""
        with generators_restored():
            _restore(self._current)
            try:
                yield
            finally:
                self._current = _states()


def _states() -> tuple[Any, Any, torch.Tensor]:
    """Return the states of the CPU's generators. Quick, as every batch needs it; no GPU's generator is read."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _restore(states: tuple[Any, Any, torch.Tensor]) -> None:
    """Restore the states of the CPU's generators."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


def capture() -> dict[str, Any]:
    """Return the states of python's, numpy's and torch's generators, and of the GPUs that are in use.

    The states are plain values and CPU tensors, which a checkpoint can hold. Reading a GPU's waits for the GPU.
    """
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        # Tensors: of thousands of ranks, lists would take long to send.
        "python": [version, torch.tensor(internal, dtype=torch.uint32), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if accelerator := _in_use():
        state[accelerator.type] = [torch.get_device_module(accelerator).get_rng_state(i) for i in _indices()]
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore states that ``capture`` returned. If the number of GPUs differs, only the first ones are restored.

    Args:
        state: the states, perhaps of a process on another host.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy(), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if accelerator := _in_use():
        for i, generator_state in zip(_indices(), state.get(accelerator.type, ()), strict=False):
            torch.get_device_module(accelerator).set_rng_state(generator_state, i)


def _in_use() -> torch.device | None:
    """Return the type of this process's accelerator, or None if it has not used any."""
    # Reading a state would initialise an accelerator that this process does not use, and take its memory.
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    return device if getattr(module, "is_initialized", torch.accelerator.is_available)() else None


def _indices() -> list[int]:
    """Return the visible GPUs, beginning with this rank's own, which may have another index after a resume."""
    current, count = torch.accelerator.current_device_index(), torch.accelerator.device_count()
    return [(current + i) % count for i in range(count)]
