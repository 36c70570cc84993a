"""Local SGD and DiLoCo: the ranks train alone for a round of steps, and then average how far they have come.

A round is ``local_sgd.steps`` optimizer steps, or fewer at the end of an epoch. Within it, each rank steps on its own
gradients. At its end, the difference between the round's first weights and a rank's last ones, averaged over the ranks,
is the gradient of an outer optimizer, SGD with Nesterov momentum, which steps from the first weights. The next round
begins with the result, the shared weights. A learning rate of 1 without momentum averages the weights.

With several fragments, one of the weights is sent every ``steps / fragments`` steps, and taken
when the next one is sent: the outer optimizer steps from its shared weights, and each rank continues with the mean of
the result and its own weights. Only at the end of an epoch, all fragments are sent, and ranks have the shared weights.

Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019); Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models" (arXiv 2311.08105), and "Streaming DiLoCo with Overlapping Communication"
(arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from unitrain import call_site
from unitrain.checkpoint.names import in_order
from unitrain.checkpoint.sharded.saving import of_rank
from unitrain.communication.communicator import Communicator
from unitrain.communication.sharding import divided
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
from unitrain.training.loop.window import Window
from unitrain.training.models.buffers import BufferSync
from unitrain.training.state_parts import StatePart

_MOMENTUM, _GRADIENT, _LOCAL = "momentum_buffer", "gradient", "local weight"
_MIXED = 0.5  # share of the shared weights of a fragment in what a rank continues with


class _Fragment(NamedTuple):
    """Weights that are averaged together, the weights that ranks share, and the reducer of the differences."""

    weights: list[Parameter]
    shared: list[Parameter]
    reducer: GradientReducer


class LocalSGD(Feature, Replicas):
    """The rounds of a run.

    Attributes:
        steps: number of steps in the round so far; 0 between two rounds. With fragments, in the epoch so far.
        length: number of steps in a whole round.
        fragments: number of fragments.
        failed: whether a step of the round was skipped on this rank, since a loss or gradient was non-finite.
        swapped: whether the model has the shared weights within a round.
    """

    differ = "with local_sgd, ranks have different ones within a round"

    def __init__(self, settings: LocalSGDSettings) -> None:
        self.steps: int = 0
        self.length: int = settings.steps
        self.fragments: int = settings.fragments
        self.failed: bool = False
        self.swapped: bool = False
        self._first_failure: Findings | None = None  # of the run, on this rank
        self._optimizer: Optimizer | None = None
        self._parameters: Sequence[Parameter] = []
        self._weights: list[Parameter] = []
        self._shared: list[Parameter] = []
        self._fragments: list[_Fragment] = []
        self._sent: list[_Fragment] = []  # and not taken yet
        self._reducers: list[GradientReducer] = []  # not waited for yet
        momentum = settings.outer_momentum
        # It steps the shared weights. torch refuses optimizers without parameters, and there are none yet.
        self._outer = SGD([torch.zeros(0)], lr=settings.outer_lr, momentum=momentum, nesterov=momentum > 0)
        self._shared_of: dict[Parameter, Parameter] = {}  # by the weight, also if it is frozen meanwhile

    def plug_in(self, sockets: Sockets) -> None:
        """Average weights after rounds, in place of gradients in steps, and save the states that ranks don't share."""
        super().plug_in(sockets)
        self._communicator = communicator = sockets.communicator
        self._prepared, config = sockets.prepared, sockets.config
        self._nonfinite = NonFinitePolicy(communicator, sockets.prepared, config.on_nonfinite)
        syncs = config.broadcast_buffers and communicator.world_size > 1
        self._buffers = BufferSync(communicator, sockets.prepared) if syncs else None
        self._make_reducer = partial(
            GradientReducer,
            collectives=communicator.collectives,
            armed=lambda: False,  # no backward: the gradients of shared weights are set by hand
            wire_dtype=HALF_DTYPES.get(config.compression),
        )
        # All ranks have the same averages, and so agree on whether they are finite.
        self._guard = GuardedStep(communicator.device, None, None)
        sockets.averaging = Averaging(unit=communicator.world_size)
        sockets.replicas = self
        sockets.parts.append(partial(LocalStates.of, communicator, self))

    @property
    def is_open(self) -> bool:
        """Whether the last step was one after which nothing is to be sent."""
        return self.steps > 0 and not self._due

    @property
    def _due(self) -> int:
        """The number of fragments sent in this epoch, if the last step sends one; else 0."""
        sent = self.steps * self.fragments // self.length
        return sent if sent > (self.steps - 1) * self.fragments // self.length else 0

    @property
    def at_stake(self) -> int:
        """The number of steps that may be missing in the shared weights."""
        return min(self.steps, self.length - (-self.length // self.fragments))

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Keep the first weights of a round."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            raise UsageError("local_sgd supports one optimizer: give it all parameters, in groups.")
        if self.swapped:
            raise UsageError("a step was made within evaluation(), which has put the shared weights into the model.")
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
            self._first_failure = self._nonfinite.findings(window, averaged=False)
        return True

    def end_step(self) -> bool:
        """Average the fragments that are due after a step."""
        if self.is_open:
            return False
        if self.steps:
            self._average(ends=self.fragments == 1)  # with fragments, only an epoch ends a round
        return True

    def end_epoch(self) -> bool:
        """End the round, if one is open: average the weights of the ranks."""
        if not self.steps:
            return False
        self._average(ends=True)
        return True

    def _watch(self, trained: list[Parameter]) -> None:
        if sum(p.numel() > 0 for p in trained) < self.fragments:
            raise UsageError(
                f"local_sgd.fragments is {self.fragments}, but only {len(trained)} parameters are trained, and each "
                "fragment needs one: set it to fewer."
            )
        self._weights, self._shared = trained, [self._shared_with(p) for p in trained]
        self._guard.all_plain = all(p.device == self._communicator.device for p in trained)
        self._outer.param_groups[0]["params"] = self._shared
        part_of, self._fragments = divided(trained, [0] * self.fragments), []
        for n in range(self.fragments):
            weights = [weight for weight in trained if part_of[weight] == n]
            shared = [self._shared_of[weight] for weight in weights]
            self._fragments.append(_Fragment(weights, shared, self._make_reducer(shared, name=f"local steps.{n}")))

    def _shared_with(self, weight: Parameter) -> Parameter:
        """Return the shared weight that belongs to a weight of the model."""
        if weight not in self._shared_of:
            self._shared_of[weight] = Parameter(torch.empty_like(weight))
        return self._shared_of[weight]

    @torch.no_grad()
    def _average(self, *, ends: bool) -> None:
        """Take the fragment that is under way, and send the next one, or all of them if the round ends. Collective.

        If a fragment is non-finite on a rank, since a step of its was, the run ends with the last shared weights.
        """
        watched = set(self._weights)
        if any(p.requires_grad and p not in watched for p in self._parameters):
            raise UsageError("a parameter was unfrozen within a round of local_sgd: change it after an epoch.")
        pulse = self._communicator.collectives.pulse
        with pulse.within(WAITING):
            when = f"within the {self.at_stake} steps up to step {pulse.step}"
            finite = self._take()
            if finite:
                self._send(self._fragments if ends else [self._fragments[(self._due - 1) % self.fragments]])
                finite = not ends or self._take()
            if ends or not finite:
                torch._foreach_copy_([*self._weights], [*self._shared])
                self.steps, self.failed = 0, False
            if finite:
                self._share_buffers()
            else:
                findings = self._first_failure or (True, False, None)
                self._nonfinite.end(self._nonfinite.message(findings, self._parameters, when))

    def _send(self, fragments: list[_Fragment]) -> None:
        """Start to average how far the weights are from the shared ones."""
        for weights, shared, reducer in fragments:
            differences = torch._foreach_sub([*shared], [*weights])
            # NaN for all ranks to see.
            torch._foreach_div_(differences, torch.nan if self.failed else self._communicator.world_size)
            for parameter, difference in zip(shared, differences, strict=True):
                parameter.grad = difference
            if self._communicator.world_size > 1:
                reducer.start()
                self._reducers.append(reducer)
        self._sent = fragments

    def _share_buffers(self) -> None:
        if self._buffers is not None and self._optimizer is not None:
            self._buffers.after_update(self._optimizer, self._parameters, True)

    def wait(self) -> None:
        """Wait for the fragments that are under way."""
        while self._reducers:
            self._reducers.pop(0).finish()

    def _take(self) -> bool:
        """Let the outer optimizer step, and mix its result with this rank's weights; not if it is non-finite."""
        self.wait()
        stepped = [shared for fragment in self._sent for shared in fragment.shared]
        if not stepped:
            return True
        finite, _ = self._guard(self._outer, stepped, self._guard.gradients(stepped))
        for parameter in stepped:
            parameter.grad = None
        for weights, shared, _ in self._sent if finite else ():
            torch._foreach_lerp_([*weights], [*shared], _MIXED)
        self._sent = []
        return finite

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the contents of the weights and of the shared weights."""
        for weight, shared in zip(self._weights, self._shared, strict=True):
            held = weight.clone()
            weight.copy_(shared)
            shared.copy_(held)
        self.swapped = not self.swapped

    def check(self, call: str) -> None:
        """Raise UsageError within a round."""
        if self.steps:
            raise UsageError(
                f"{call} was called after step {(self.steps - 1) % self.length + 1} of a round of {self.length} "
                "(local_sgd.steps), within which the ranks have different weights: call it after the epoch, which ends "
                "one, or, without fragments, after the last step of a round."
            )

    @contextmanager
    def shared_weights(self, call: str | None = None, *, buffers: bool = False) -> Iterator[None]:
        """Context manager that gives the model the weights that ranks share. Collective with ``buffers``.

        Raises UsageError for a ``call`` within a round without fragments, where they are the round's first ones.
        """
        if not self.steps or self.swapped:
            yield
            return
        if self.fragments == 1 and call is not None:
            self.check(call)
        if buffers:
            self._share_buffers()
        self.swap()
        try:
            with self._prepared.swapped(self, self.swap):
                yield
        finally:
            self.swap()

    def at_end(self) -> None:
        """Warn if a round has not ended."""
        if not self.steps:
            return
        self.wait()  # what is under way would fail when communication ends
        if self._communicator.is_main:
            call_site.warn(
                f"the run has ended within a round of local_sgd: its last {self.at_stake} steps were not averaged "
                "over the ranks. End it after an epoch, or, without fragments, after the last step of a round."
            )

    def collect(self, optimizer: Optimizer) -> dict[str, Any]:
        """Wait for the fragment under way. Return its mean with the outer optimizer's state.

        Values belong to the numbers of parameters of the optimizer that trains them.
        """
        self.wait()
        state = {number: dict(self._outer.state[shared]) for number, shared in self._numbered(optimizer)}
        for number, shared in self._numbered(optimizer):
            if shared.grad is not None:
                state[number][_GRADIENT] = shared.grad
        # With another schedule, the number of steps would mean another place in a round.
        schedule = [self.steps, self.length, self.fragments]
        return {"state": state, "param_groups": optimizer.state_dict()["param_groups"], "schedule": schedule}

    def with_local(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Add this rank's weights to a state of parameters, if the model has the shared ones within a round."""
        if not self.swapped:
            return state
        states = state["state"]
        # The model has the shared weights now, and their place has those of this rank.
        local = {n: {**states.get(n, {}), _LOCAL: held.detach()} for n, held in self._numbered(optimizer)}
        return {**state, "state": {**states, **local}, "failed": self.failed}

    def _numbered(self, optimizer: Optimizer) -> list[tuple[int, Parameter]]:
        """Return the shared weights with the numbers of their parameters."""
        numbers = {p: n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        return [(numbers[weight], shared) for weight, shared in zip(self._weights, self._shared, strict=True)]

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any], local: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Load states for the parameters of an optimizer, which have the shared weights.

        Args:
            state: as ``collect`` has returned it.
            local: this rank's state. If it has no weights, or another schedule, a new round begins.
            optimizer: the optimizer.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.wait()
        # New shared weights: those of now may have the gradients of fragments that were under way.
        self._shared_of, self._sent, self.steps, self.failed = {}, [], 0, False
        self._outer.state.clear()
        self._watch([p for p in parameters if p.requires_grad])
        for number, entry in state["state"].items():
            if _MOMENTUM in entry:
                shared = self._shared_with(parameters[number])
                self._outer.state[shared][_MOMENTUM] = entry[_MOMENTUM].to(shared)
        weights = {n: entry.pop(_LOCAL) for n, entry in local["state"].items() if _LOCAL in entry}
        if not weights or state["schedule"][1:] != [self.length, self.fragments]:
            return
        self.steps, self.failed = state["schedule"][0], local["failed"]
        torch._foreach_copy_([*self._shared], [*self._weights])
        for number, weight in weights.items():
            parameters[number].copy_(weight)
        for number, shared in self._numbered(optimizer):
            if _GRADIENT in state["state"].get(number, {}):
                shared.grad = state["state"][number][_GRADIENT].to(shared)
        self._sent = [fragment for fragment in self._fragments if fragment.shared[0].grad is not None]


class LocalStates(StatePart):
    """The states that ranks don't share: their optimizer states, and their weights within a round.

    A checkpoint has the shared weights, and rank 0's optimizer state beside them. This is the rest: the states of the
    outer optimizer, and of the other ranks' optimizers, with the weights of each rank. Rank 0 collects them.
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
        rounds, ranks, optimizer = self._rounds, self._ranks, self._optimizer
        first = rounds.with_local(rounds.collect(optimizer), optimizer)
        local = rounds.with_local(optimizer.state_dict(), optimizer)
        return [first, *(of_rank(ranks, rank, local) for rank in range(1, ranks.world_size))]

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
        self._rounds.restore(states[0], states[ranks.rank] if fits else {"state": {}}, optimizer)
        if ranks.rank in mine - {0}:
            optimizer.load_state_dict(states[ranks.rank])
