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
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from unitrain import call_site
from unitrain.communication.sharding import divided
from unitrain.device import HALF_DTYPES
from unitrain.errors import UsageError
from unitrain.features.local_sgd import LocalSGDSettings
from unitrain.features.local_sgd.states import LocalStates
from unitrain.training.feature import Feature
from unitrain.training.gradients.gradients import GradientReducer
from unitrain.training.gradients.guard import GuardedStep
from unitrain.training.loop.averaging import WAITING, Averaging, Replicas
from unitrain.training.loop.judge import Findings, NonFinitePolicy
from unitrain.training.loop.sockets import Sockets
from unitrain.training.loop.window import Window
from unitrain.training.models.buffers import BufferSync

_MOMENTUM, _GRADIENT, _OWN = "momentum_buffer", "gradient", "own weight"
_MIXED = 0.5  # share of the shared weights of a fragment in what a rank continues with


class _Fragment(NamedTuple):
    """Weights that are averaged together, what the ranks share of them, and what sums their differences."""

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
        self._outer = SGD([torch.zeros(0)], lr=settings.outer_lr, momentum=momentum, nesterov=momentum > 0)
        self._momentum: dict[Tensor, Tensor] = {}  # of weights, until they are trained

    def plug_in(self, sockets: Sockets) -> None:
        """Average weights after rounds, in place of gradients in steps, and save what ranks don't share."""
        super().plug_in(sockets)
        self._communicator = communicator = sockets.communicator
        self._prepared, config = sockets.prepared, sockets.config
        self._nonfinite = NonFinitePolicy(communicator, sockets.prepared, config.on_nonfinite)
        syncs = config.broadcast_buffers and communicator.world_size > 1
        self._buffers = BufferSync(communicator, sockets.prepared) if syncs else None
        self._make_reducer = partial(
            GradientReducer,
            collectives=communicator.collectives,
            armed=lambda: False,
            wire_dtype=HALF_DTYPES.get(config.compression),
        )
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
            if len(trained) != len(self._weights) or not all(map(is_, trained, self._weights)):
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
        """Average what is due after a step."""
        if self.is_open:
            return False
        if self.steps:
            self._average(ends=self.fragments == 1)
        return True

    def end_epoch(self) -> bool:
        """End the round, if one is open: average what the ranks have learned."""
        if not self.steps:
            return False
        self._average(ends=True)
        return True

    def _average(self, *, ends: bool) -> None:
        """Average, and end the run if a step of the round was not finite. Collective."""
        pulse = self._communicator.collectives.pulse
        with pulse.within(WAITING):
            when = f"within the {self.at_stake} steps up to step {pulse.step}"
            if not self.average(ends=ends):
                own = self._first_failure or (True, False, None)
                self._nonfinite.end(self._nonfinite.message(own, self._parameters, when))

    def _watch(self, trained: list[Parameter]) -> None:
        if sum(p.numel() > 0 for p in trained) < self.fragments:
            raise UsageError(
                f"local_sgd.fragments is {self.fragments}, but only {len(trained)} parameters are trained, and each "
                "fragment needs one: set it to fewer."
            )
        for weight, shared in zip(self._weights, self._shared, strict=True):
            if _MOMENTUM in self._outer.state[shared]:
                self._momentum[weight] = self._outer.state[shared][_MOMENTUM]
        self._outer.state.clear()
        self._weights, self._shared = trained, [Parameter(torch.empty_like(p)) for p in trained]
        self._guard.all_plain = all(p.device == self._communicator.device for p in trained)
        self._outer.param_groups[0]["params"] = self._shared
        for weight, shared in zip(trained, self._shared, strict=True):
            if weight in self._momentum:
                self._outer.state[shared][_MOMENTUM] = self._momentum.pop(weight).to(shared)
        part_of, self._fragments = divided(trained, [0] * self.fragments), []
        for n in range(self.fragments):
            weights = [weight for weight in trained if part_of[weight] == n]
            parts = [shared for weight, shared in zip(trained, self._shared, strict=True) if part_of[weight] == n]
            self._fragments.append(_Fragment(weights, parts, self._make_reducer(parts, name=f"local steps.{n}")))

    @torch.no_grad()
    def average(self, *, ends: bool) -> bool:
        """Take the fragment that is under way, and send the next one, or all of them if the round ends. Collective.

        Returns:
            Whether what was taken was finite on all ranks; otherwise a round begins with the shared weights of before.
        """
        watched = set(self._weights)
        if any(p.requires_grad and p not in watched for p in self._parameters):
            raise UsageError("a parameter was unfrozen within a round of local_sgd: change it after an epoch.")
        finite = self._take()
        if finite:
            self._send(self._fragments if ends else [self._fragments[(self._due - 1) % self.fragments]])
            finite = not ends or self._take()
        if ends or not finite:
            torch._foreach_copy_([*self._weights], [*self._shared])
            self.steps, self.failed = 0, False
        if finite:
            self._share_buffers()
        return finite

    def _send(self, fragments: list[_Fragment]) -> None:
        """Start to average how far the weights are from the shared ones."""
        for weights, shared, reducer in fragments:
            differences = torch._foreach_sub([*shared], [*weights])
            # NaN for all ranks to see.
            torch._foreach_div_(differences, torch.nan if self.failed else self._communicator.world_size)
            for one, difference in zip(shared, differences, strict=True):
                one.grad = difference
            if self._communicator.world_size > 1:
                reducer.start()
                self._reducers.append(reducer)
        self._sent = fragments

    def _share_buffers(self) -> None:
        if self._buffers is not None and self._optimizer is not None:
            self._buffers.after_update(self._optimizer, self._parameters, True)

    def wait(self) -> None:
        """Wait for what is under way."""
        while self._reducers:
            self._reducers.pop(0).finish()

    def _take(self) -> bool:
        """Let the outer optimizer step, and mix its result with this rank's weights; not if it is non-finite."""
        self.wait()
        stepped = [one for fragment in self._sent for one in fragment.shared]
        if not stepped:
            return True
        finite, _ = self._guard(self._outer, stepped, self._guard.gradients(stepped))
        for one in stepped:
            one.grad = None
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
        """Return the outer optimizer's state, and the mean of what is under way, for which it waits.

        Values belong to the numbers of parameters of the optimizer that trains them.
        """
        self.wait()
        state = {number: dict(self._outer.state[shared]) for number, shared in self._numbered(optimizer)}
        for number, shared in self._numbered(optimizer):
            if shared.grad is not None:
                state[number][_GRADIENT] = shared.grad
        schedule = [self.steps, self.length, self.fragments]
        return {"state": state, "param_groups": optimizer.state_dict()["param_groups"], "schedule": schedule}

    def with_own(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return a state of parameters with this rank's weights, if the model has the shared ones within a round."""
        if not self.swapped:
            return state
        own = {n: {**state["state"].get(n, {}), _OWN: one.detach()} for n, one in self._numbered(optimizer)}
        return {**state, "state": {**state["state"], **own}, "failed": self.failed}

    def _numbered(self, optimizer: Optimizer) -> list[tuple[int, Parameter]]:
        """Return the shared weights with the numbers of their parameters."""
        numbers = {p: n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        return [(numbers[weight], shared) for weight, shared in zip(self._weights, self._shared, strict=True)]

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any], own: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Load these states for the parameters of an optimizer, which have the shared weights.

        Without weights in this rank's own state, or with one of another schedule, a new round begins.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.wait()
        self._weights, self._shared, self._sent, self.steps, self.failed = [], [], [], 0, False
        self._momentum = {parameters[n]: one[_MOMENTUM] for n, one in state["state"].items() if _MOMENTUM in one}
        self._watch([p for p in parameters if p.requires_grad])
        weights = {n: one.pop(_OWN) for n, one in own["state"].items() if _OWN in one}
        if not weights or state["schedule"][1:] != [self.length, self.fragments]:
            return
        self.steps, self.failed = state["schedule"][0], own["failed"]
        torch._foreach_copy_([*self._shared], [*self._weights])
        for number, weight in weights.items():
            parameters[number].copy_(weight)
        for number, shared in self._numbered(optimizer):
            if _GRADIENT in state["state"].get(number, {}):
                shared.grad = state["state"][number][_GRADIENT].to(shared)
        self._sent = [one for one in self._fragments if one.shared[0].grad is not None]
