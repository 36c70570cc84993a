"""A trial: a run within the run, such as a fold of a cross-validation or a point of a sweep."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
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
        self._first_states = copy.deepcopy(self.sockets.states.collect())

    def begin(self, name: str, seed: int | None) -> Trial:
        """Return a trial that all ranks begin now. Collective."""
        outer, of_run = self.sockets.communicator.collectives.pulse.trial, self.sockets.config.seed
        derived = rng.derived_seed("trial", of_run, name) % 2**32
        trial = Trial(f"{outer}/{name}" if outer else name, derived if seed is None else seed)
        self.compare(f"trial({trial.name!r}, seed={trial.seed})")
        return trial

    @contextmanager
    def within(self, trial: Trial) -> Iterator[ExitStack]:
        """Set the run aside within a block, for a trial. Yield a stack, which puts all back at the end.

        Collective at the end, unless the block has raised an error: it may not have done so on the other ranks.

        Raises:
            UsageError: something outside of the trial is not complete.
        """
        reads = any(not iteration.is_over for iteration in self.sockets.batches.begun)
        if reads or self.step.within_window or not self.loop.is_training():
            raise UsageError(
                f"trial {trial.name!r} was begun within a loop over a loader, an accumulation window or an evaluation, "
                "whose batches and gradients would mix with those of the trial: begin it after the loop."
            )
        sockets, step, states = self.sockets, self.step, self.sockets.states
        hooks, windows, outer = sockets.hooks, step.windows, [*sockets.hooks]
        config = sockets.config.model_copy(update={"seed": trial.seed})
        fresh = {name: value for name, value in vars(OpenBatches()).items() if name not in _CONTINUED}
        with self.outside(trial) as stack:
            stack.callback(rng.restore, rng.capture())
            rng.seed_all(trial.seed)
            give(stack, sockets, config=config)
            give(stack, sockets.batches, **fresh)
            give(stack, sockets.prepared, count=0, layers=[*sockets.prepared.layers])
            give(stack, self.preparation, config=config, ranks_differ=False)
            give(stack, step, global_step=0, window_end_actions=[*step.window_end_actions])
            give(stack, windows, outer=[*windows])
            give(stack, states, objects={**states.objects}, waiting={})
            stack.callback(states.load, {name: copy.deepcopy(states.collect()[name]) for name in self._first_states})
            states.load(copy.deepcopy(self._first_states))
            lists: tuple[list[Any], ...] = sockets.passes, sockets.verdicts, sockets.parts, sockets.ways_back
            stack.callback(self._remove_added, outer, [(known, [*known]) for known in lists])
            hooks.set([hook for hook in outer if not hook.of_checkpoint])
            sockets.ways_back.clear()  # they lead to states outside
            yield stack
            self.compare(f"the end of trial {trial.name!r}")
            step.end_epoch()
            for hook in _without(hooks, outer):
                hook.at_end()

    def _remove_added(self, outer: list[StepHook], lists: list[tuple[list[Any], list[Any]]]) -> None:
        """Remove the features that a trial has added, and mark its optimizers, which the run is to forget.

        Args:
            outer: the hooks that there were.
            lists: other lists, each with what it had.
        """
        hooks, windows = self.sockets.hooks, self.step.windows
        windows.ended = [window for window in windows if window not in windows.outer]
        for known, earlier in lists:
            known[:] = earlier
        self.step.check_verdicts()
        added, removed = _without(hooks, outer), _without(outer, hooks)
        hooks.set(_without(outer, (hook for hook in removed if not hook.of_checkpoint)))
        for hook in added:
            hook.at_close()

    def outside(self, trial: Trial) -> ExitStack:
        """Return a context manager in which the open checkpoint is left alone, and a trial's is opened or closed."""
        stopping, stack = self.sockets.stopping, ExitStack()
        give(stack, self.sockets.communicator.collectives.pulse, trial=trial.name)
        give(stack, stopping, checkpoint=None, outer=stopping.checkpoint or stopping.outer)
        return stack


def give(stack: ExitStack, target: Any, **values: Any) -> None:
    """Give an object other attributes, until a stack is closed."""
    for name, value in values.items():
        stack.callback(setattr, target, name, getattr(target, name))
        setattr(target, name, value)


def _without(hooks: Iterable[StepHook], others: Iterable[StepHook]) -> list[StepHook]:
    """Return the hooks that are not among others, by identity: hooks of scripts may define equality."""
    known = {id(other) for other in others}
    return [hook for hook in hooks if id(hook) not in known]
