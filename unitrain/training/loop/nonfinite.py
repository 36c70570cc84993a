"""Handles steps with a non-finite loss or gradient, in the same way on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn

from torch.nn import Parameter

from unitrain.communication.communicator import Communicator
from unitrain.errors import NonFiniteError
from unitrain.job.watch.stopping import Stopped
from unitrain.process import print_stdout
from unitrain.training.gradients.local_gradients import is_finite
from unitrain.training.loop.window import Window
from unitrain.training.models.prepared import PreparedModules


class NonFinitePolicy:
    """Applies ``on_nonfinite`` to a step, and reports which rank and parameter caused it."""

    def __init__(
        self, communicator: Communicator, prepared: PreparedModules, policy: Literal["stop", "skip", "raise"]
    ) -> None:
        self._communicator = communicator
        self._prepared = prepared
        self._policy = policy
        self._recorded: tuple[bool, bool, int | None] | None = None

    def record(self, window: Window) -> None:
        """Keep what is not finite in a step of this rank alone, for the message at the end of its round."""
        if self._recorded is None:
            self._recorded = self._findings(window, distributed=False)

    def message(self, window: Window, when: str, *, distributed: bool) -> str:
        """Return a message with the ranks that have a non-finite loss or gradient, and the first parameter. Collective.

        The window has reduced gradients, over several ranks if ``distributed``.
        """
        own = self._recorded or self._findings(window, distributed=distributed)
        ranks = self._communicator.all_gather_data(own)
        bad_losses = [rank for rank, (is_good, _, _) in enumerate(ranks) if not is_good]
        bad_gradients = [rank for rank, (_, is_good, _) in enumerate(ranks) if not is_good]
        if bad_losses:
            where = f"the loss of {_ranks(bad_losses)}"
        else:
            owners = f" of {_ranks(bad_gradients)}" if bad_gradients else ""
            where = f"a gradient{owners} (the losses of all ranks were finite)"
        first = min((number for _, _, number in ranks if number is not None), default=None)  # of a shard on any rank
        named = "" if first is None else f"; first affected parameter: {self._prepared.name(window.parameters[first])}"
        return f"not finite {when}: {where}{named}."

    def _findings(self, window: Window, *, distributed: bool) -> tuple[bool, bool, int | None]:
        """Return whether this rank's losses are finite, and its gradients, and the first parameter for which not."""
        losses = window.loss_is_finite and all(bool(loss.isfinite()) for loss in window.losses)
        # The local ones, before they were averaged, as far as they were kept.
        gradients = distributed and window.local_gradients.are_finite()
        return losses, gradients, self._first_bad(window.parameters)

    def _first_bad(self, parameters: Sequence[Parameter]) -> int | None:
        """Return the position of the first parameter with a non-finite reduced gradient on this rank."""
        for i, parameter in enumerate(parameters):
            if parameter.grad is not None and not is_finite(self._communicator.to_local(parameter.grad)):
                return i
        return None

    def skips(self, message: str) -> bool:
        """Return whether the step is to be skipped, and if so print the message."""
        if self._policy == "skip":
            self._print(f"unitrain: {message} The step was skipped on all ranks.")
        return self._policy == "skip"

    def end(self, message: str) -> NoReturn:
        """End the run: raise NonFiniteError under ``raise``, and Stopped under ``stop``."""
        advice = "The weights are those before it. Set on_nonfinite to skip to skip such steps."
        if self._policy == "raise":
            raise NonFiniteError(f"{message} {advice}")
        self._print(f"unitrain: stopped: {message} {advice}")
        raise Stopped(NonFiniteError.exit_code)

    def _print(self, line: str) -> None:
        if self._communicator.is_main:
            print_stdout(line)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
