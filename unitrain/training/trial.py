"""A trial: a run within the run, such as a fold of a cross-validation or a point of a sweep."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from unitrain import rng
from unitrain.errors import UsageError
from unitrain.training.hooks import StepHook
from unitrain.training.loop.batches import OpenBatches
from unitrain.training.loop.loop import TrainingLoop
from unitrain.training.loop.sockets import Sockets
from unitrain.training.loop.step import TrainingStep
from unitrain.training.models.preparation import Preparation

_SEEDS = 2**32
# What a trial continues, of the batches that loaders have yielded: models know the first, and the second only grows.
_CONTINUED = ("current_batch", "position")


@dataclass(frozen=True)
class Trial:
    """A trial. Made by ``strategy.trial``.

    Attributes:
        name: its name; within another trial, after that one's: ``outer/inner``.
        seed: the seed of its random numbers, which is ``strategy.config.seed`` in it.
    """

    name: str
    seed: int


@dataclass(eq=False)
class Trials:
    """Keeps trials apart from each other, and from the rest of the run.

    Attributes:
        sockets: the parts of the run.
        step: makes the steps.
        loop: knows whether the script trains.
        preparation: of modules and optimizers.
        compare: returns once every rank has come to the same call.
    """

    sockets: Sockets
    step: TrainingStep
    loop: TrainingLoop
    preparation: Preparation
    compare: Callable[[str], None]

    def __post_init__(self) -> None:
        # Of what the settings turn on. What the script adds outside of trials, it adds for all of the run.
        self._first_states = self._states(self.sockets.states.objects)

    def _states(self, names: Iterable[str]) -> dict[str, Any]:
        """Copy small states of the run."""
        return {name: copy.deepcopy(self.sockets.states.objects[name].state_dict()) for name in names}

    def begin(self, name: str, seed: int | None) -> Trial:
        """Return a trial that all ranks begin now. Collective.

        Raises:
            UsageError: its name or seed is none, or something outside of it is not complete.
        """
        if not name or not isinstance(name, str) or not 0 <= (seed or 0) < _SEEDS:
            raise UsageError(f"a trial has a name, and a seed from 0 to {_SEEDS - 1} or None, not {name!r} and {seed}.")
        reads = any(not iteration.is_over for iteration in self.sockets.batches.begun)
        if reads or self.step.within_window or not self.loop.is_training():
            raise UsageError(
                f"trial {name!r} was begun within a loop over a loader, an accumulation window, or an evaluation, whose "
                "batches and gradients would mix with those of the trial: begin it after the loop."
            )
        outer, own = self.sockets.communicator.collectives.pulse.trial, self.sockets.config.seed
        derived = rng.derived_seed("trial", own, name) % _SEEDS
        trial = Trial(f"{outer}/{name}" if outer else name, derived if seed is None else seed)
        self.compare(f"trial({trial.name!r}, seed={trial.seed})")
        return trial

    @contextmanager
    def within(self, trial: Trial) -> Iterator[None]:
        """Let the run be a trial's within a block, and put back at its end what it was.

        Collective at the end, unless the block has raised an error: it may not have done so on the other ranks.
        """
        sockets, hooks, windows = self.sockets, self.sockets.hooks, self.step.windows
        windows_before = [*windows]
        config = sockets.config.model_copy(update={"seed": trial.seed})
        fresh = {key: value for key, value in vars(OpenBatches()).items() if key not in _CONTINUED}
        outer, lists = [*hooks], (sockets.passes, sockets.verdicts, sockets.parts, sockets.ways_back)
        resting = [hook for hook in outer if hook.of_checkpoint]
        kept, states, random = [[*known] for known in lists], self._states(self._first_states), rng.capture()
        rng.seed_all(trial.seed)
        hooks.set(_without(outer, resting))
        sockets.ways_back.clear()  # they lead to states outside
        try:
            with (
                self.outside(trial),
                _given(sockets, config=config),
                _given(sockets.batches, **fresh),
                _given(sockets.states, objects={**sockets.states.objects}, waiting={}),
                _given(sockets.prepared, count=0, layers=[*sockets.prepared.layers]),
                _given(self.preparation, config=config, ranks_differ=False),
                _given(self.step, global_step=0, window_end_actions=[*self.step.window_end_actions]),
                _given(windows, outer=windows_before),
            ):
                self._load(self._first_states)
                yield
                self.compare(f"the end of trial {trial.name!r}")
                self.step.end_epoch()
                for hook in _without(hooks, outer):
                    hook.at_end()
        finally:
            windows.ended += [window for window in windows if window not in windows_before]
            for known, earlier in zip(lists, kept, strict=True):
                known[:] = earlier  # type: ignore[call-overload]  # of one list at a time
            added = _without(hooks, outer)
            hooks.set([hook for hook in outer if hook in resting or not _without([hook], hooks)])
            self.step.check_verdicts()
            self._load(states)
            rng.restore(random)
            for hook in added:
                hook.at_close()

    @contextmanager
    def outside(self, trial: Trial) -> Iterator[None]:
        """Leave the open checkpoint alone within a block, where that of a trial is opened or closed."""
        stopping = self.sockets.stopping
        with (
            _given(self.sockets.communicator.collectives.pulse, trial=trial.name),
            _given(stopping, checkpoint=None, outer=stopping.checkpoint or stopping.outer),
        ):
            yield

    def _load(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            self.sockets.states.objects[name].load_state_dict(copy.deepcopy(state))


@contextmanager
def _given(target: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes within a block."""
    earlier = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in earlier.items():
            setattr(target, name, value)


def _without(hooks: Iterable[StepHook], others: Iterable[StepHook]) -> list[StepHook]:
    """Return the hooks that are not among others, by identity: hooks of scripts may define equality."""
    known = {id(other) for other in others}
    return [hook for hook in hooks if id(hook) not in known]
