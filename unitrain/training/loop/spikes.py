"""Finds steps whose gradients have an unusually large norm (``on_spike``), on all ranks alike.

The rule is that of OLMo-core's skip-step optimizers: more than 6 standard deviations above the mean of the last 128
steps. A norm of less than twice the mean is never a spike, since norms may hardly vary for a while.

Weights go wrong before a spike shows it. PaLM's training went back about 100 steps, and left out the batches between
(A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section 5.1). So does ``rewind``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.errors import NonFiniteError
from unitrain.job.watch.stopping import Stopped
from unitrain.process import print_stdout
from unitrain.training.hooks import StepHook
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.training_state import Copies

_STEPS, _FEWEST = 128, 64
_DEVIATIONS = 6.0
_COPIED_EVERY = 64  # steps. Of the last two copies, the older one is put back


class Spikes(StepHook):
    """Applies ``on_spike``.

    ``optimizers`` returns all optimizers.

    Attributes:
        norms: of the last steps, spikes included: a level that stays is none.
        stops: whether the run is to end at a spike.
        averages: averages of weights, which go back with them.
    """

    def __init__(
        self,
        communicator: Communicator,
        policy: Literal["warn", "skip", "rewind", "stop"],
        prepared: PreparedModules,
        optimizers: Callable[[], Iterable[Optimizer]],
    ) -> None:
        self.norms: deque[float] = deque(maxlen=_STEPS)
        self.stops: bool = policy == "stop"
        self.averages: list[Tensor] = []
        self._communicator, self._pulse = communicator, communicator.pulse
        self._policy = policy
        self._prepared, self._optimizers = prepared, optimizers
        self._copies: deque[tuple[int, Copies]] = deque(maxlen=2)  # by the step after which they were made
        self._message = ""

    def at_boundary(self) -> None:
        """Copy the state to the host, if it is time to. Called with ``rewind`` only."""
        step = self._pulse.step
        if self._copies and step < self._copies[-1][0]:
            self._copies.clear()  # the script has gone back itself
        if not self._copies or step >= self._copies[-1][0] + _COPIED_EVERY:
            modules = [self._prepared.unwrap(module) for module in self._prepared]
            weights = [one for module in modules for one in (*module.parameters(), *module.buffers())]
            states = [one.state for one in self._optimizers()]
            copies = Copies(states, (), (*weights, *self.averages), self._communicator.to_local)
            self._copies.append((step, copies))

    def found(self, norm: float) -> bool:
        """Record the norm of a step's gradients, and return whether the step is not to be made."""
        known = np.array(self.norms)
        self.norms.append(norm)
        if len(known) < _FEWEST or norm <= known.mean() + max(_DEVIATIONS * known.std(), known.mean()):
            return False
        self._message = (
            f"spike at step {self._pulse.step + 1}: the norm of the gradients is {norm:.4g}, and was "
            f"{known.mean():.4g} on average over the {len(known)} steps before."
        )
        if self._policy == "warn":
            self._print(self._message)
        return self._policy != "warn"

    def act(self) -> None:
        """Continue without the step, or end the run. All ranks call this at the same step."""
        if self.stops:
            self._print(f"stopped: {self._message} The weights are those before it.")
            raise Stopped(NonFiniteError.exit_code)
        done = "The step was skipped on all ranks."
        if self._copies:
            step, copies = self._copies[0]
            copies.put_back()
            done = f"The weights are those after step {step} again, and the next batch follows."
        self._print(f"{self._message} {done}")

    def _print(self, line: str) -> None:
        if self._communicator.is_main:
            print_stdout(f"unitrain: {line}")
