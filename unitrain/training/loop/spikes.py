"""Finds steps whose gradients have an unusually large norm (``on_spike``), on all ranks alike.

The rule is that of OLMo-core's skip-step optimizers: more than 6 standard deviations above the mean of the last 128
steps. A norm of less than twice the mean is never a spike, since norms may hardly vary for a while.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NoReturn

import numpy as np

from unitrain.communication.communicator import Communicator
from unitrain.errors import NonFiniteError
from unitrain.job.watch.stopping import Stopped
from unitrain.process import print_stdout

_STEPS, _FEWEST = 128, 64
_DEVIATIONS = 6.0


class Spikes:
    """Applies ``on_spike``.

    Attributes:
        norms: of the last steps, spikes included: a level that stays is none.
        stops: whether the run is to end at a spike, by ``end``.
    """

    def __init__(self, communicator: Communicator, policy: Literal["warn", "skip", "stop"]) -> None:
        self.norms: deque[float] = deque(maxlen=_STEPS)
        self.stops: bool = policy == "stop"
        self._communicator = communicator
        self._policy = policy
        self._message = ""

    def found(self, norm: float) -> bool:
        """Record the norm of a step's gradients, and return whether the step is not to be made."""
        known = np.array(self.norms)
        self.norms.append(norm)
        if len(known) < _FEWEST or norm <= known.mean() + max(_DEVIATIONS * known.std(), known.mean()):
            return False
        step = self._communicator.pulse.step + 1
        self._message = (
            f"spike at step {step}: the norm of the gradients is {norm:.4g}, and was {known.mean():.4g} on average over"
            f" the {len(known)} steps before."
        )
        if not self.stops:
            self._print(f"{self._message}{' The step was skipped on all ranks.' if self._policy == 'skip' else ''}")
        return self._policy != "warn"

    def end(self) -> NoReturn:
        """End the run. All ranks call this at the same step."""
        self._print(f"stopped: {self._message} The weights are those before it.")
        raise Stopped(NonFiniteError.exit_code)

    def _print(self, line: str) -> None:
        if self._communicator.is_main:
            print_stdout(f"unitrain: {line}")
