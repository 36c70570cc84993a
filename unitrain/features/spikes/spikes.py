"""Finds steps with gradients of an unusually large norm (``on_spike``), the same on all ranks.

The rule is that of OLMo-core's skip-step optimizers: more than 6 standard deviations above the mean of the last 128
steps. A norm of less than twice the mean is never a spike, since norms may hardly vary for a while.

Weights go wrong before a spike shows it. PaLM's training went back about 100 steps, and left out the batches between
(A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section 5.1). So does ``rewind``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from unitrain.errors import NonFiniteError, UsageError
from unitrain.job.watch.stopping import Stopped
from unitrain.process import print_stdout
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets

_STEPS, _FEWEST = 128, 64
_DEVIATIONS = 6.0
_GOES_BACK = 64  # steps, or more: to the newest copy that is so old


class Spikes(Feature):
    """Applies ``on_spike``."""

    name = "spikes"

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._norms: deque[float] = deque(maxlen=_STEPS)  # spikes included: a level that stays is none
        self._message = ""

    def plug_in(self, sockets: Sockets) -> None:
        """Judge each step by the norm of its gradients."""
        super().plug_in(sockets)
        self._is_main, self._pulse = sockets.communicator.is_main, sockets.communicator.collectives.pulse
        self._ways_back = sockets.ways_back
        if self._policy == "rewind":
            # Copies in memory are kept until they are so old.
            sockets.goes_back = _GOES_BACK

    def at_boundary(self) -> None:
        """Raise UsageError with ``rewind`` if there is no way back."""
        if self._policy == "rewind" and not self._ways_back:
            raise UsageError(
                "on_spike is rewind, which goes back to a copy of the state in memory, and there are copies while a "
                "checkpoint is open: call strategy.checkpoint(...) before the first step, or set on_spike to skip."
            )

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
        step = self._go_back() if self._policy == "rewind" else None
        if step is not None:
            done = f"The weights are those after step {step} again, and the next batch follows."
        self._print(f"{self._message} {done}")

    def _go_back(self) -> int | None:
        newest = self._pulse.step - _GOES_BACK
        return next((step for way in self._ways_back if (step := way.go_back(newest)) is not None), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the norms."""
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these norms."""
        self._norms.clear()
        self._norms.extend(state["norms"])

    def _print(self, line: str) -> None:
        if self._is_main:
            print_stdout(f"unitrain: {line}")
