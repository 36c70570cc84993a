"""Finds steps whose gradients have an unusually large norm (``on_spike``), on all ranks alike.

The rule is that of OLMo-core's skip-step optimizers: more than 6 standard deviations above the mean of the last 128
steps. A norm of less than twice the mean is never a spike, since norms may hardly vary for a while.

Weights go wrong before a spike shows it. PaLM's training went back about 100 steps, and left out the batches between
(A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section 5.1). So does ``rewind``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.errors import NonFiniteError
from unitrain.job.watch.stopping import Stopped
from unitrain.process import print_stdout
from unitrain.training.feature import Feature
from unitrain.training.hooks import StepHook
from unitrain.training.loop.sockets import Sockets
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.training_state import Copies

_STEPS, _FEWEST = 128, 64
_DEVIATIONS = 6.0
_COPIED_EVERY = 64  # steps. Of the last two copies, the older one is put back


class Rewind(StepHook):
    """Keeps copies of the weights, of what follows them, and of the optimizers' states, on the host."""

    def __init__(self, communicator: Communicator, prepared: PreparedModules, followers: list[Tensor]) -> None:
        self._communicator, self._pulse = communicator, communicator.collectives.pulse
        self._prepared, self._followers = prepared, followers
        self._optimizers: list[Optimizer] = []
        self._copies: deque[tuple[int, Copies]] = deque(maxlen=2)  # by the step after which they were made

    def registered(self, optimizer: Optimizer) -> None:
        """Copy an optimizer's state from now on."""
        self._optimizers.append(optimizer)

    def at_boundary(self) -> None:
        """Copy the state to the host, if it is time to."""
        step = self._pulse.step
        if self._copies and step < self._copies[-1][0]:
            self._copies.clear()  # the script has gone back itself
        if not self._copies or step >= self._copies[-1][0] + _COPIED_EVERY:
            modules = [self._prepared.unwrap(module) for module in self._prepared]
            weights = [one for module in modules for one in (*module.parameters(), *module.buffers())]
            states = [one.state for one in self._optimizers]
            copies = Copies(states, (), (*weights, *self._followers), self._communicator.sharding.to_local)
            self._copies.append((step, copies))

    def put_back(self) -> int | None:
        """Put the older copy back, and return its step; None if there is none."""
        if not self._copies:
            return None
        step, copies = self._copies[0]
        copies.put_back()
        return step


class Spikes(Feature):
    """Applies ``on_spike``."""

    name = "spikes"

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._norms: deque[float] = deque(maxlen=_STEPS)  # spikes included: a level that stays is none
        self._rewind: Rewind | None = None
        self._message = ""

    def plug_in(self, sockets: Sockets) -> None:
        """Judge each step by the norm of its gradients."""
        super().plug_in(sockets)
        self._is_main, self._pulse = sockets.communicator.is_main, sockets.communicator.collectives.pulse
        if self._policy == "rewind":
            self._rewind = Rewind(sockets.communicator, sockets.prepared, sockets.followers)
            sockets.hooks.add_hook(self._rewind)

    def forbids(self, norm: float) -> bool:
        """Record the norm of a step's gradients, and return whether the step is not to be made."""
        known = np.array(self._norms)
        self._norms.append(norm)
        if len(known) < _FEWEST or norm <= known.mean() + max(_DEVIATIONS * known.std(), known.mean()):
            return False
        self._message = (
            f"spike at step {self._pulse.step + 1}: the norm of the gradients is {norm:.4g}, and was "
            f"{known.mean():.4g} on average over the {len(known)} steps before."
        )
        if self._policy == "warn":
            self._print(self._message)
        return self._policy != "warn"

    def forbidden(self) -> None:
        """Continue without the step, or end the run. All ranks call this at the same step."""
        if self._policy == "stop":
            self._print(f"stopped: {self._message} The weights are those before it.")
            raise Stopped(NonFiniteError.exit_code)
        done = "The step was skipped on all ranks."
        step = None if self._rewind is None else self._rewind.put_back()
        if step is not None:
            done = f"The weights are those after step {step} again, and the next batch follows."
        self._print(f"{self._message} {done}")

    def state_dict(self) -> dict[str, Any]:
        """Return the norms."""
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with these norms."""
        self._norms.clear()
        self._norms.extend(state["norms"])

    def _print(self, line: str) -> None:
        if self._is_main:
            print_stdout(f"unitrain: {line}")
