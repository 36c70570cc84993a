"""What all ranks do, and say, where a loss or a gradient was not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn

from unitrain.communicator import Communicator
from unitrain.errors import NonFiniteError
from unitrain.job.stopping import Stopped
from unitrain.training.local_gradients import is_finite
from unitrain.training.prepared import PreparedModules
from unitrain.training.window import Window


class NonFinitePolicy:
    """What all ranks do about a step that was given up, and say of it.

    Args:
        communicator: of this process.
        prepared: knows the parameters' names.
        policy: ``on_nonfinite``.
    """

    def __init__(
        self, communicator: Communicator, prepared: PreparedModules, policy: Literal["stop", "skip", "raise"]
    ) -> None:
        self._communicator = communicator
        self._prepared = prepared
        self._policy = policy

    def message(self, window: Window, step: int, *, distributed: bool) -> str:
        """Say whose loss or gradient it was, and the first bad parameter. Collective.

        Args:
            window: what was given up, with the gradients of all ranks.
            step: the number of the step.
            distributed: whether the gradients are those of several ranks.
        """
        losses = window.loss_is_finite and all(bool(loss.isfinite()) for loss in window.losses)
        # Its own, before they were averaged, as far as this rank knows.
        gradients = distributed and window.local_gradients.are_finite()
        told = self._communicator.all_gather_object((losses, gradients))
        bad_losses, bad_gradients = (
            [rank for rank, its in enumerate(one) if not its] for one in zip(*told, strict=True)
        )
        if bad_losses:
            where = f"the loss of {_ranks(bad_losses)}"
        else:
            whose = f" of {_ranks(bad_gradients)}" if bad_gradients else ""
            where = f"a gradient{whose} (every rank's loss was finite)"
        first = next((p for p in window.parameters if p.grad is not None and not is_finite(p.grad)), None)
        named = "" if first is None else f"; first bad parameter: {self._prepared.name(first)}"
        return f"not finite at step {step}: {where}{named}."

    def skips(self, message: str) -> bool:
        """Say that the step is skipped, where it is to be, and return whether it is."""
        if self._policy == "skip":
            self._print(f"unitrain: {message} The step was skipped on all ranks.")
        return self._policy == "skip"

    def end(self, message: str) -> NoReturn:
        """End the run.

        Raises:
            NonFiniteError: under ``raise``.
            Stopped: under ``stop``.
        """
        advice = "The weights are those of the step before. Set on_nonfinite to skip to leave such steps out."
        if self._policy == "raise":
            raise NonFiniteError(f"{message} {advice}")
        self._print(f"unitrain: stopped: {message} {advice}")
        raise Stopped(NonFiniteError.exit_code)

    def _print(self, line: str) -> None:
        if self._communicator.is_main:
            print(line, flush=True)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
