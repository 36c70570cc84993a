"""A trial: a run within the run, such as a fold of a cross-validation or a point of a sweep."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from unitrain import rng
from unitrain.errors import UsageError
from unitrain.job.watch.stopping import Saves
from unitrain.training.hooks import StepHook
from unitrain.training.loop.batches import OpenBatches
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
        preparation: of modules and optimizers.
        compare: returns once every rank has come to the same call.
        ended: checkpoints of trials that have ended, to be closed.
    """

    sockets: Sockets
    step: TrainingStep
    preparation: Preparation
    compare: Callable[[str], None]
    ended: list[Saves] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Of what the settings turn on. What the script adds outside of trials, it adds for all of the run.
        self._first_states = copy.deepcopy(self.sockets.states.collect())

    @contextmanager
    def run(self, name: str, seed: int | None) -> Iterator[Trial]:
        """Set the run aside within a block, for a trial. See ``Strategy.trial``.

        Collective at the end, unless the block has raised an error: it may not have done so on the other ranks.

        Raises:
            UsageError: something outside of the trial is not complete.
        """
        if not name:
            raise UsageError("trial() takes a name, which is not empty: its random numbers follow from it.")
        outer, of_run = self.sockets.communicator.collectives.pulse.trial, self.sockets.config.seed
        derived = rng.derived_seed("trial", of_run, name) % 2**32
        trial = Trial(f"{outer}/{name}" if outer else name, derived if seed is None else seed)
        self.compare(f"trial({trial.name!r}, seed={trial.seed})")
        self.tidy_up()
        reads = any(not iteration.is_over for iteration in self.sockets.batches.begun)
        if reads or self.step.within_window or not torch.is_grad_enabled():
            raise UsageError(
                f"trial {trial.name!r} was begun within a loop over a loader, an accumulation window or an evaluation, "
                "whose batches and gradients would mix with the trial's: begin it after the loop."
            )
        hooks = self.sockets.hooks
        outer_hooks = [*hooks]
        with ExitStack() as stack:
            self._set_aside(trial, stack)
            stack.callback(self._remove_added, outer_hooks)
            hooks.set([hook for hook in hooks if not hook.of_checkpoint])
            yield trial
            self.compare(f"the end of trial {trial.name!r}")
            self.step.end_epoch()
            for hook in _without(hooks, outer_hooks):
                hook.at_end()
        self.tidy_up()

    def _set_aside(self, trial: Trial, stack: ExitStack) -> None:
        """Begin anew with all that a trial has for itself, until a stack is closed."""
        sockets, states, stopping = self.sockets, self.sockets.states, self.sockets.stopping
        stack.callback(rng.restore, rng.capture())
        rng.seed_all(trial.seed)
        config = sockets.config.model_copy(update={"seed": trial.seed})
        _give(stack, sockets, config=config)
        _give(stack, self.preparation, config=config, ranks_differ=False)
        _give(stack, sockets.prepared, count=0, layers=[*sockets.prepared.layers])
        fresh = {name: value for name, value in vars(OpenBatches()).items() if name not in _CONTINUED}
        _give(stack, sockets.batches, **fresh)
        _give(stack, self.step, global_step=0, window_end_actions=[*self.step.window_end_actions])
        _give(stack, sockets.communicator.collectives.pulse, trial=trial.name)
        _give(stack, stopping, checkpoint=None, outer=stopping.checkpoint or stopping.outer, round_began=None)
        stack.callback(lambda: self.ended.extend(filter(None, [stopping.checkpoint])))
        _give(stack, states, objects={**states.objects}, waiting={})
        stack.callback(states.load, {name: copy.deepcopy(states.collect()[name]) for name in self._first_states})
        states.load(copy.deepcopy(self._first_states))
        stack.callback(self.step.check_verdicts)
        lists: tuple[list[Any], ...] = sockets.passes, sockets.verdicts, sockets.parts, sockets.ways_back
        for known in lists:
            stack.callback(known.__setitem__, slice(None), [*known])  # in place: others have these lists, too
        sockets.ways_back.clear()  # they lead to states outside

    def _remove_added(self, outer: list[StepHook]) -> None:
        """Remove the hooks that a trial has added, and restore the hooks of the open checkpoint."""
        hooks = self.sockets.hooks
        added = _without(hooks, outer)
        hooks.set([*_without(hooks, added), *(hook for hook in outer if hook.of_checkpoint)])
        for hook in added:
            hook.at_close()

    def tidy_up(self) -> None:
        """Close the checkpoints of trials that have ended, and forget their modules and optimizers. Collective."""
        self.close_ended()
        self.step.windows.forget_dropped()

    def close_ended(self) -> None:
        """Close the checkpoints of trials that have ended. Collective."""
        while self.ended:
            self.ended.pop().close()


def _give(stack: ExitStack, target: Any, **values: Any) -> None:
    """Give an object other attributes, until a stack is closed."""
    for name, value in values.items():
        stack.callback(setattr, target, name, getattr(target, name))
        setattr(target, name, value)


def _without(hooks: Iterable[StepHook], others: Iterable[StepHook]) -> list[StepHook]:
    """Return the hooks that are not among others, by identity: hooks of scripts may define equality."""
    known = {id(other) for other in others}
    return [hook for hook in hooks if id(hook) not in known]
