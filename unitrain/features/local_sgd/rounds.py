"""Local SGD and DiLoCo: the ranks train alone for a round of steps, and then average how far they have come.

A round is ``local_sgd.steps`` optimizer steps, or fewer at the end of an epoch. Within it, each rank steps on its own
gradients. At its end, the difference between the round's first weights and a rank's last ones, averaged over the ranks,
is the gradient of an outer optimizer, SGD with Nesterov momentum, which steps from the first weights. The next round
begins with the result, the shared weights. A learning rate of 1 without momentum averages the weights.

Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019); Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models" (arXiv 2311.08105).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from unitrain.checkpoint.names import in_order
from unitrain.checkpoint.sharded.saving import of_rank
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import SentState, needed
from unitrain.device import HALF_DTYPES
from unitrain.errors import CheckpointError, UsageError
from unitrain.features.local_sgd import LocalSGDSettings
from unitrain.training.feature import Feature
from unitrain.training.gradients.gradients import GradientReducer
from unitrain.training.gradients.guard import GuardedStep
from unitrain.training.loop.averaging import WAITING, Averaging, Replicas
from unitrain.training.loop.judge import Findings, NonFinitePolicy
from unitrain.training.loop.sockets import Sockets
from unitrain.training.models.buffers import BufferSync
from unitrain.training.state_parts import StatePart
from unitrain.training.windows.window import Window

_MOMENTUM = "momentum_buffer"


class LocalSGD(Feature, Replicas):
    """The rounds of a run.

    Attributes:
        steps: number of steps in the round so far; 0 between two rounds.
        length: number of steps in a whole round.
        failed: whether a step of the round was skipped on this rank, since a loss or gradient was non-finite.
    """

    def __init__(self, settings: LocalSGDSettings) -> None:
        super().__init__("with local_sgd, ranks have different ones within a round")
        self.steps: int = 0
        self.length: int = settings.steps
        self.failed: bool = False
        self._first_failure: Findings | None = None  # of the run, on this rank
        self._optimizer: Optimizer | None = None
        self._parameters: Sequence[Parameter] = []
        self._weights: list[Parameter] = []
        self._shared: list[Parameter] = []
        self._reducer: GradientReducer | None = None  # of the differences; None for a single process
        momentum = settings.outer_momentum
        # It steps the shared weights. torch refuses optimizers without parameters, and there are none yet.
        self._outer = SGD([torch.zeros(0)], lr=settings.outer_lr, momentum=momentum, nesterov=momentum > 0)
        self._shared_of: dict[Parameter, Parameter] = {}  # by the weight, also if it is frozen meanwhile

    def plug_in(self, sockets: Sockets) -> None:
        """Average weights after rounds, in place of gradients in steps, and save the states that ranks don't share."""
        super().plug_in(sockets)
        self._communicator = communicator = sockets.communicator
        config = sockets.config
        self._nonfinite = NonFinitePolicy(communicator, sockets.prepared, config.on_nonfinite)
        syncs = config.broadcast_buffers and communicator.world_size > 1
        self._buffers = BufferSync(communicator, sockets.prepared) if syncs else None
        self._wire_dtype = HALF_DTYPES.get(config.compression)
        # All ranks have the same averages, and so agree on whether they are finite.
        self._guard = GuardedStep(communicator.device, None)
        sockets.averaging = Averaging(unit=communicator.world_size)
        sockets.replicas = self
        sockets.parts.append(partial(LocalStates.of, communicator, self))

    def keep(self, optimizers: Sequence[Optimizer], parameters: Collection[Parameter]) -> None:
        """Begin anew with another optimizer, if the run has forgotten the one that has trained."""
        if all(optimizer is not self._optimizer for optimizer in optimizers):
            self.steps, self.failed, self._first_failure, self._optimizer = 0, False, None, None
            self._outer.state.clear()
            self._parameters = self._weights = self._shared = self._outer.param_groups[0]["params"] = []
            self._reducer, self._shared_of = None, {}

    @property
    def is_open(self) -> bool:
        """Whether a round is open."""
        return self.steps > 0

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Keep the first weights of a round."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            raise UsageError("local_sgd supports one optimizer: give it all parameters, in groups.")
        self._parameters = parameters
        if self.steps == 0:
            trained = [p for p in parameters if p.requires_grad]
            # By identity, since tensors compare elements.
            if list(map(id, trained)) != list(map(id, self._weights)):
                self._watch(trained)
            torch._foreach_copy_([*self._shared], [*self._weights])

    def after_update(self, optimizer: Optimizer, parameters: Sequence[Parameter], stepped: bool) -> None:
        """Count a step."""
        self.steps += 1
        self.failed |= not stepped

    def not_finite(self, window: Window) -> bool:
        """Let the end of the round tell: the other ranks don't know of it before."""
        if self._first_failure is None:
            self._first_failure = self._nonfinite.findings(window)
        return True

    def end_step(self) -> bool:
        """End the round after its last step: average the weights of the ranks."""
        return not self.is_open if self.steps < self.length else self.end_epoch()

    def end_epoch(self) -> bool:
        """End the round, if one is open: average the weights of the ranks."""
        if not self.is_open:
            return False
        self._average()
        return True

    def _watch(self, trained: list[Parameter]) -> None:
        self._weights, self._shared = trained, [self._shared_with(p) for p in trained]
        self._guard.all_plain = all(p.device == self._communicator.device for p in trained)
        self._outer.param_groups[0]["params"] = self._shared
        if self._communicator.world_size > 1:
            self._reducer = GradientReducer(
                self._shared,
                self._communicator.collectives,
                armed=lambda parameter: False,  # no backward: the gradients of shared weights are set by hand
                name="local steps",
                wire_dtype=self._wire_dtype,
            )

    def _shared_with(self, weight: Parameter) -> Parameter:
        """Return the shared weight that belongs to a weight of the model."""
        if weight not in self._shared_of:
            self._shared_of[weight] = Parameter(torch.empty_like(weight))
        return self._shared_of[weight]

    @torch.no_grad()
    def _average(self) -> None:
        """Average how far the ranks have come, and continue with the weights that follow from it. Collective.

        If the average is non-finite, since a step of a rank was, the run ends with the first weights of the round.
        """
        watched = set(self._weights)
        if any(p.requires_grad and p not in watched for p in self._parameters):
            raise UsageError("a parameter was unfrozen within a round of local_sgd: change it after an epoch.")
        pulse = self._communicator.collectives.pulse
        with pulse.within(WAITING):
            differences = torch._foreach_sub([*self._shared], [*self._weights])
            # NaN for all ranks to see.
            torch._foreach_div_(differences, torch.nan if self.failed else self._communicator.world_size)
            for shared, difference in zip(self._shared, differences, strict=True):
                shared.grad = difference
            if self._reducer is not None:
                self._reducer.finish()
            finite, _ = self._guard.step(self._outer, self._shared, self._guard.gradients(self._shared))
            for shared in self._shared:
                shared.grad = None
            torch._foreach_copy_([*self._weights], [*self._shared])
            steps, self.steps, self.failed = self.steps, 0, False
            if not finite:
                findings = self._first_failure or (True, False, None)
                when = f"within the {steps} steps up to step {pulse.step}"
                self._nonfinite.end(self._nonfinite.message(findings, self._parameters, when))
            if self._buffers is not None and self._optimizer is not None:
                self._buffers.after_update(self._optimizer, self._parameters, True)

    def check(self, call: str) -> None:
        """Raise UsageError within a round."""
        if self.steps:
            raise UsageError(
                f"{call} was called after step {self.steps} of a round of {self.length} (local_sgd.steps), within "
                "which the ranks have different weights: call it after the last step of a round, or after the epoch, "
                "which ends one."
            )

    def at_end(self) -> None:
        """Warn if a round has not ended."""
        if self.is_open:
            self._communicator.warn(
                f"the run has ended within a round of local_sgd: its last {self.steps} steps were not averaged "
                "over the ranks. End it after the last step of a round, or after an epoch."
            )

    def collect(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the outer optimizer's state, by the numbers of parameters of the optimizer that trains them."""
        numbers = {p: n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        state = {numbers[p]: self._outer.state[s] for p, s in zip(self._weights, self._shared, strict=True)}
        return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}

    def restore(self, state: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Load what ``collect`` has returned, between two rounds."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.steps, self.failed = 0, False
        self._outer.state.clear()
        self._watch([p for p in parameters if p.requires_grad])
        for number, entry in state["state"].items():
            if _MOMENTUM in entry:
                shared = self._shared_with(parameters[number])
                self._outer.state[shared][_MOMENTUM] = entry[_MOMENTUM].to(shared)


class LocalStates(StatePart):
    """The states of the outer optimizer, and of the ranks' optimizers, which differ.

    A checkpoint has the shared weights, and rank 0's optimizer state beside them. This is the rest. Rank 0 collects it.
    """

    name = "local_sgd"

    def __init__(self, communicator: Communicator, rounds: LocalSGD, optimizer: Optimizer) -> None:
        self._ranks = communicator
        self._rounds = rounds
        self._optimizer = optimizer

    @classmethod
    def of(cls, communicator: Communicator, rounds: LocalSGD, objects: Mapping[str, Any]) -> LocalStates | None:
        """Return the part of a checkpoint of these objects, if an optimizer is among them."""
        optimizers = [value for value in objects.values() if isinstance(value, Optimizer)]
        return cls(communicator, rounds, *optimizers) if optimizers else None

    def collect(self) -> list[Any]:
        """Return the states. Collective; only rank 0's result can be used."""
        ranks, local = self._ranks, self._optimizer.state_dict()
        others = (of_rank(ranks, rank, local) for rank in range(1, ranks.world_size))
        return [self._rounds.collect(self._optimizer), *others]

    def check(self, outline: list[Any], *, force: bool) -> None:
        """Raise CheckpointError if saved states, given their outlines, come from another number of ranks."""
        if len(outline) != self._ranks.world_size and not force:
            raise CheckpointError(
                f"with local_sgd, each rank has an optimizer state of its own, and the checkpoint has those of "
                f"{len(outline)} ranks, not of {self._ranks.world_size}: resume with {len(outline)} processes, or with "
                "resume(force=True), which gives all ranks rank 0's, and the weights that they share. Nothing was "
                "loaded."
            )

    def in_order(self, saved: list[Any], optimizer: str, order: list[int]) -> list[Any]:
        """Return the states of optimizers with parameters in another order."""
        return [in_order(state, order) for state in saved]

    def load(self, saved: SentState) -> None:
        """Load the states that ``collect`` has returned. Collective."""
        ranks, optimizer = self._ranks, self._optimizer
        fits = len(saved.outline) == ranks.world_size
        mine = {0, ranks.rank} if fits else {0}
        states = saved.receive(new=needed(lambda path: path[0] in mine))
        self._rounds.restore(states[0], optimizer)
        if ranks.rank in mine - {0}:
            optimizer.load_state_dict(states[ranks.rank])
