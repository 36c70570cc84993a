"""Decides, once the gradients are known, whether all ranks make a step, and how the run continues if they don't."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from torch import Tensor
from torch.nn import Parameter

from unitrain.communication.communicator import Communicator
from unitrain.errors import NonFiniteError
from unitrain.job.watch.stopping import Stopped
from unitrain.process import print_stdout
from unitrain.training.gradients.evidence import is_finite
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.windows.weights import LossScale
from unitrain.training.windows.window import Window

Findings = tuple[bool, bool, int | None]
"""Whether losses are finite, and local gradients, and the number of the first parameter whose gradient is not."""


class Verdict:
    """May forbid a step, on all ranks alike."""

    def forbids(self, norm: float) -> bool:
        """Return whether a step is not to be made. Called for every step whose gradients are finite.

        Args:
            norm: 2-norm of the gradients before clipping, the same on all ranks.
        """
        return False

    def forbidden(self) -> None:
        """Continue after a step that this has forbidden, or raise ``Stopped`` to end the run."""

    def not_finite(self, window: Window) -> bool:
        """Return whether this deals with a step with a non-finite loss or gradient, so that the run continues.

        Called on all ranks, before ``on_nonfinite`` is applied. The step is not made in any case.

        Args:
            window: of the optimizer, with its gradients.
        """
        return False


@dataclass(eq=False)
class NonFinitePolicy:
    """Applies ``on_nonfinite`` to a step, and reports which rank and parameter caused it.

    Attributes:
        communicator: of this process.
        prepared: the modules whose parameters are named.
        policy: the setting.
    """

    communicator: Communicator
    prepared: PreparedModules
    policy: Literal["stop", "skip", "raise"]

    def message(self, findings: Findings, parameters: Sequence[Parameter], when: str) -> str:
        """Return which ranks have a non-finite loss or gradient, and the first parameter. Collective.

        Args:
            findings: of this rank.
            parameters: of the optimizer.
            when: the place in the run, such as "at step 3".
        """
        ranks = self.communicator.all_gather_data(findings)
        bad_losses = [rank for rank, (is_good, _, _) in enumerate(ranks) if not is_good]
        bad_gradients = [rank for rank, (_, is_good, _) in enumerate(ranks) if not is_good]
        if bad_losses:  # gradients are non-finite then as well, so they say nothing more
            where = f"the loss of {_ranks(bad_losses)}"
        else:
            owners = f" of {_ranks(bad_gradients)}" if bad_gradients else ""
            where = f"a gradient{owners} (the losses of all ranks were finite)"
        first = min((number for _, _, number in ranks if number is not None), default=None)  # of a shard on any rank
        named = "" if first is None else f"; first affected parameter: {self.prepared.name(parameters[first])}"
        return f"not finite {when}: {where}{named}."

    def findings(self, window: Window) -> Findings:
        """Return which losses and gradients of a window are finite on this rank. The host waits for the device.

        Args:
            window: with reduced gradients.
        """
        # The local ones, before they were averaged, as far as they were kept.
        gradients = window.evidence.gradients_are_finite()
        return window.evidence.losses_are_finite(), gradients, self._first_bad(window.parameters)

    def _first_bad(self, parameters: Sequence[Parameter]) -> int | None:
        """Return the position of the first parameter with a non-finite reduced gradient on this rank."""
        gradients = ((i, p.grad) for i, p in enumerate(parameters) if p.grad is not None)
        to_local = self.communicator.sharding.to_local
        return next((i for i, gradient in gradients if not is_finite(to_local(gradient))), None)

    def handle(self, window: Window, when: str) -> None:
        """Skip the step, or end the run. Collective: all ranks call this at the same step.

        Raises:
            NonFiniteError: under ``raise``.
            Stopped: under ``stop``.
        """
        message = self.message(self.findings(window), window.parameters, when)
        if self.policy != "skip":
            self.end(message)
        self._print(f"unitrain: {message} The step was skipped on all ranks.")

    def end(self, message: str) -> NoReturn:
        """End the run: raise NonFiniteError under ``raise``, and Stopped under ``stop``."""
        advice = "The weights are those before it. Set on_nonfinite to skip to skip such steps."
        if self.policy == "raise":  # for scripts that catch it, and mend the run themselves
            raise NonFiniteError(f"{message} {advice}")
        self._print(f"unitrain: stopped: {message} {advice}")
        raise Stopped(NonFiniteError.exit_code)

    def _print(self, line: str) -> None:
        if self.communicator.is_main:
            print_stdout(line)


@dataclass(eq=False)
class Judge:
    """Asks the verdicts, and deals with steps that were not made.

    Attributes:
        verdicts: on steps; the list may grow.
        nonfinite: applies ``on_nonfinite``.
        scale: of the losses, whose overflows make gradients infinite.
        forbidding: the verdicts that have forbidden the last step.
    """

    verdicts: Sequence[Verdict]
    nonfinite: NonFinitePolicy
    scale: LossScale
    forbidding: list[Verdict] = field(default_factory=list)

    @property
    def reads_norms(self) -> bool:
        """Whether a verdict depends on the norm of the gradients, so that each step must compute it."""
        return any(type(verdict).forbids is not Verdict.forbids for verdict in self.verdicts)

    def forbids(self, norm: float) -> bool:
        """Return whether a step with this norm of finite gradients is not to be made."""
        # All are asked, also after one has forbidden the step: each keeps count of the norms.
        self.forbidding = [verdict for verdict in self.verdicts if verdict.forbids(norm)]
        return bool(self.forbidding)

    def not_made(self, window: Window, norm: Tensor | None, number: int) -> None:
        """Continue without a step, or end the run. Called on all ranks for the same step.

        Args:
            window: of the optimizer that has not stepped.
            norm: of its gradients, if they are finite, and a verdict has forbidden the step.
            number: of the step in the run.

        Raises:
            NonFiniteError: a gradient is non-finite, and ``on_nonfinite`` is raise.
            Stopped: the run ends here, by ``on_nonfinite`` or a verdict.
        """
        if norm is not None:
            for verdict in self.forbidding:
                verdict.forbidden()
        elif any(verdict.not_finite(window) for verdict in self.verdicts):
            return
        elif not self.scale.handles_overflows:  # else a smaller scale may suffice: the step is skipped, as torch does
            when = f"at step {number}{self.nonfinite.communicator.collectives.pulse.of_trial}"
            self.nonfinite.handle(window, when)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
