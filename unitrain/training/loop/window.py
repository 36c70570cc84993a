"""Accumulation windows: the parameters that each optimizer trains, and the backwards since its last step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.data.order.sharding import MicroBatch
from unitrain.device import by_device
from unitrain.errors import UsageError
from unitrain.training.gradients.evidence import Evidence
from unitrain.training.hooks import Hooks, StepHook
from unitrain.training.loop.weights import Total, Weight
from unitrain.training.models.prepared import PreparedModules, present


@dataclass(eq=False, slots=True)
class Shared:
    """The parameters that the optimizer of a window shares with others.

    Attributes:
        rivals: windows of optimizers that train some of the same parameters, and these.
        partners: those of them that share the losses of this window.
        aside: gradients of shared parameters, while these have gradients of another window.
    """

    rivals: dict[Window, list[Parameter]] = field(default_factory=dict)
    partners: set[Window] = field(default_factory=set)
    aside: dict[Tensor, Tensor | None] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Window:
    """The accumulation window of one optimizer: its parameters, and the micro-batches since its last step.

    Only its methods write to it.

    Attributes:
        reference: to the optimizer, which is freed when the script drops it.
        name: its name in messages and collectives, unique among optimizers, and the same on all ranks.
        evidence: records which losses and gradients are finite.
        total: the sum of the weights of the losses.
        drop: drops the gradients of parameters.
        parameters: of the optimizer.
        trained: those that require gradients.
        micro_batch: of the last backward; None without a loader.
        micro_batches: number of those completed by ``update``.
        last: whether the last backward ends the window; None if the current micro-batch had none yet.
        witness: a gradient, its parameter and its version, to notice changes.
        shared: what it shares with other windows.
    """

    reference: ref[Optimizer]
    name: str
    evidence: Evidence
    total: Total
    drop: Callable[[Sequence[Parameter]], None]
    parameters: list[Parameter] = field(default_factory=list)
    trained: list[Parameter] = field(default_factory=list)
    micro_batch: MicroBatch | None = None
    micro_batches: int = 0
    last: bool | None = None
    witness: tuple[Parameter, Tensor, int] | None = None
    shared: Shared = field(default_factory=Shared)

    def watch(self, parameters: list[Parameter], trained: list[Parameter]) -> None:
        """Accumulate for these parameters of the optimizer from now on.

        Args:
            parameters: all of the optimizer's.
            trained: those that require gradients.
        """
        self.parameters = parameters
        known = set(map(id, self.trained))
        # A backward for another optimizer may have left gradients of parameters that this one trains only now.
        self.drop([p for p in trained if id(p) not in known])
        self.trained = trained

    def clear(self) -> None:
        """Drop everything that was accumulated, including gradients, and start a new window."""
        self.drop(self.parameters)
        self.evidence.clear()
        if self.total.weight is not None:
            self.total.clear()
        self.micro_batch = None
        self.micro_batches = 0
        self.last = None
        self.witness = None
        if self.shared.rivals:
            self.shared.aside.clear()

    @property
    def is_open(self) -> bool:
        """Whether something was accumulated."""
        return self.micro_batches > 0 or self.last is not None

    def enter(self, micro_batch: MicroBatch | None, weight: Weight | None, last: bool) -> None:
        """Add a loss of a micro-batch, which ends the window if ``last``. Its backward follows.

        Args:
            micro_batch: None without a loader.
            weight: that the script gives; several as a vector, or None.
            last: whether the backward ends the window.

        Raises:
            UsageError: the micro-batch does not follow the previous one, or was weighed in another way.
        """
        if micro_batch is not None and self.last is None:
            self._check_order(micro_batch)
        if self.micro_batches or self.last is not None:
            if (weight is None) != (self.total.weight is None):
                raise UsageError("pass weight= to every backward of an accumulation window, or to none.")
            if self.total.weight is not None and self.total.weight.shape != getattr(weight, "shape", ()):
                raise UsageError("pass the same losses to every backward of an accumulation window.")
        self.micro_batch = micro_batch
        if weight is not None and self.last is None:
            self.total.add(weight, last=last)

    def leave(self, last: bool) -> None:
        """Record that the backward has ended."""
        self.last = last
        if not last:
            self.remember_gradients()

    def advance(self) -> bool:
        """Complete a micro-batch. Return whether it ends the window."""
        self.micro_batches += 1
        if self.last:
            return True
        self.last = None  # the next micro-batch has had no backward yet
        return False

    def rescale(self, gradients: list[Tensor], accumulate: int) -> None:
        """Turn the sum of gradients into the gradients of the window's mean loss, if its shares were not known.

        Args:
            gradients: of the parameters, averaged over the ranks; changed in place.
            accumulate: number of micro-batches that each backward took the window to have.
        """
        if self.total.weight is not None:
            factor = self.total.shares(1.0)
            if factor.dim():
                return  # the backward knew the total
            for dtype in {gradient.dtype for gradient in gradients}:
                for together in by_device(g for g in gradients if g.dtype == dtype):
                    torch._foreach_mul_(together, factor.to(together[0].device, dtype))
        elif self.micro_batch is None and self.micro_batches != accumulate:
            # A window ended early by sync=True: each backward was scaled by 1 / accumulate.
            for together in by_device(gradients):
                torch._foreach_mul_(together, accumulate / self.micro_batches)

    @torch.no_grad()
    def set_aside(self, number: int) -> None:
        """Take the gradients of the last backward from the parameters, and add them to those of its loss.

        Args:
            number: of the loss, among several with weights of their own.
        """
        kept = self.total.kept.setdefault(number, {})
        for parameter in self.parameters:
            leaf = self.evidence.leaf(parameter)
            if leaf.grad is not None:
                kept[parameter] = kept[parameter].add_(leaf.grad) if parameter in kept else leaf.grad
                leaf.grad = None

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the parameters the sum of the gradients that were set aside, each times the share of its loss."""
        factors = self.total.shares(1.0)
        for number, kept in self.total.kept.items():
            for parameter, gradient in kept.items():
                leaf = self.evidence.leaf(parameter)
                part = gradient * factors[number - 1].to(gradient.device)
                leaf.grad = part if leaf.grad is None else leaf.grad + part
        self.total.kept.clear()

    @torch.no_grad()
    def keep(self, parameters: Sequence[Parameter]) -> bool:
        """Keep copies of these parameters' gradients, unless that was done. Return whether they were of this window."""
        tensors = {tensor for p in parameters for tensor in (p, self.evidence.leaf(p))} - self.shared.aside.keys()
        for tensor in tensors:
            self.shared.aside[tensor] = None if tensor.grad is None else tensor.grad.clone()
        self.witness = None
        return bool(tensors)

    def restore(self) -> None:
        """Give the parameters the gradients that were kept."""
        for tensor, gradient in self.shared.aside.items():
            tensor.grad = gradient
        self.shared.aside.clear()

    def remember_gradients(self) -> None:
        """Remember a gradient and its version, to notice changes that the script makes before the step."""
        for p in self.trained or self.parameters:
            gradient = p.grad
            if gradient is not None:  # torch counts the changes of a tensor in place in its version
                self.witness = p, gradient, gradient._version
                return

    def check_gradients(self) -> None:
        """Raise UsageError if the gradients were changed or cleared since the last backward.

        Functions like ``zero_grad`` and ``clip_grad_norm_`` change all gradients, so that looking at one is enough.
        """
        if self.witness is None:
            return
        parameter, gradient, version = self.witness
        self.witness = None
        # DDP may have moved the gradient into one of its buckets.
        if parameter.grad is not None and (parameter.grad is not gradient or gradient._version == version):
            return
        if self.last is None:
            raise UsageError(
                f"the gradients of {self.name} were changed or cleared after micro-batch {self.micro_batches} of an "
                "accumulation window: remove zero_grad() from the loop, since step() clears the gradients at the end "
                "of each window, and clip with the settings clip_norm and clip_value."
            )
        raise UsageError(
            f"the gradients of {self.name} were changed between backward() and update(), when they are not averaged "
            "over the ranks yet: clip with the settings clip_norm and clip_value, and change gradients in a step "
            "pre-hook of the optimizer (optimizer.register_step_pre_hook)."
        )

    def _check_order(self, micro_batch: MicroBatch) -> None:
        """Raise UsageError if a micro-batch is the previous one again, or one between them was left out."""
        previous = self.micro_batch
        if previous is micro_batch:
            raise UsageError(
                "step() was called twice for one micro-batch of an accumulation window: add the losses, or use "
                "backward() and update()."
            )
        if self.micro_batches > 0 and micro_batch.opening:
            self.clear()  # the previous iteration ended early, within a window
            previous = None
        follows = micro_batch.first if previous is None else micro_batch.start == previous.stop
        if not follows or (previous is None and self.micro_batches > 0):
            # Its samples would count as trained on, and the shares of the others would not add up to 1.
            raise UsageError(
                f"step() was not called for a micro-batch before this one (step {micro_batch.step} of the epoch): call "
                "it for every batch that the loader yields. To leave a batch out, multiply its loss by 0."
            )


class Windows:
    """Makes a window for each optimizer, and keeps its parameters up to date when the script changes them.

    Iterating yields the windows, in the order in which their optimizers were registered.

    Attributes:
        count: number of windows, an attribute since each step asks for it.
    """

    def __init__(
        self,
        communicator: Communicator,
        backend: Backend,
        prepared: PreparedModules,
        hooks: Hooks,
        total: Callable[[str], Total],
        *,
        averaged: bool,
        moves_gradients: bool,
        all_gradients: bool,
        complete: Callable[[Window], None],
    ) -> None:
        """Make no window yet.

        Args:
            communicator: of this process.
            backend: knows the leaves of the graph, and drops gradients.
            prepared: the modules whose parameters optimizers may have.
            hooks: are told of new optimizers, and of the parameters that they train.
            total: returns what sums the weights of a window, given its name.
            averaged: whether gradients are averaged over the ranks in every step.
            moves_gradients: whether the backend may move gradients of one optimizer in a backward for another.
            all_gradients: keep all gradients as evidence (``debug``).
            complete: waits until the gradients of a window are averaged, if they are being so.
        """
        self._communicator = communicator
        self._backend, self._prepared, self._hooks = backend, prepared, hooks
        self._total = total
        self._averaged = averaged
        self._moves_gradients = moves_gradients
        self._all_gradients = all_gradients
        self._complete = complete
        self._shares = False  # whether optimizers share parameters
        self._windows: list[Window] = []
        self._of: dict[int, Window] = {}  # by the id of an optimizer that exists
        self._registered = 0  # ever
        self._groups = 0  # of the optimizer, if it is the only one
        self.count: int = 0

    def __iter__(self) -> Iterator[Window]:
        return iter(self._windows)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that exist on this rank. Others free one that the script has dropped sooner, or later."""
        return [optimizer for window in self if (optimizer := window.reference()) is not None]

    def on_all_ranks(self) -> list[Optimizer]:
        """Return the optimizers that no rank has freed, and forget the windows of the others. Collective."""
        optimizers = present(self._communicator, [window.reference for window in self])
        gone = [window for window, optimizer in zip(self, optimizers, strict=True) if optimizer is None]
        for window in gone:
            if window.is_open:  # it was dropped after a backward: another one may train its parameters next
                self._complete(window)
                window.clear()
            window.evidence.close()
            for rival in window.shared.rivals:
                del rival.shared.rivals[window]
                rival.shared.partners.discard(window)
        for key in [key for key, window in self._of.items() if window in gone]:
            del self._of[key]  # this rank has it still
        self._windows = [window for window in self if window not in gone]
        self.count = len(self._windows)
        existing = [optimizer for optimizer in optimizers if optimizer is not None]
        if gone:
            self._forget_others(existing)
        return existing

    def forget_dropped(self) -> None:
        """Forget the modules and optimizers that the script has dropped, and their parameters. Collective."""
        gc.collect()  # which torch's wrappers, and optimizers with a scheduler, need to be freed
        self._forget_others(self.on_all_ranks())

    def _forget_others(self, optimizers: Sequence[Optimizer]) -> None:
        """Forget all other optimizers, modules that the script has dropped, and parameters of neither. Collective."""
        modules = self._prepared.on_all_ranks(self._communicator)
        kept = {p for module in modules for p in module.parameters()}
        kept.update(p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        self._prepared.keep(kept)
        self._backend.keep(kept)
        for keep in self._hooks.keep:
            keep(optimizers, kept)

    @property
    def any_open(self) -> bool:
        """Whether an optimizer has gradients of a window that is not complete."""
        return any(window.is_open for window in self._windows)

    def of_update(self, optimizer: Optimizer) -> Window:
        """Return the window of an optimizer that had a backward.

        Raises:
            UsageError: it had none, or the script has changed gradients since.
        """
        window = self._of.get(id(optimizer))
        if window is None or window.last is None:
            raise UsageError(
                "update() was called without a backward() before it, or another rank has dropped this optimizer."
            )
        if window.last and window.witness is not None:
            self._check_gradients(window)
        return window

    def register(self, optimizer: Optimizer) -> Window:
        """Return the window of an optimizer, a new one for an unknown optimizer. Tell the hooks of a new one.

        Raises:
            UsageError: this is no torch optimizer.
        """
        window = self._of.get(id(optimizer))
        if window is None:
            if not isinstance(optimizer, Optimizer):
                raise UsageError(f"step() and backward() take torch optimizers, not {type(optimizer).__name__}.")
            for registered in self._hooks.registered:
                registered(optimizer)
            name = f"optimizer {self._registered}"
            evidence = Evidence(all_gradients=self._all_gradients, leaf=self._backend.sharding.leaf)
            key = id(optimizer)
            drop = self._backend.sharding.drop_gradients
            window = self._of[key] = Window(ref(optimizer), name, evidence, self._total(name), drop)
            finalize(optimizer, self._of.pop, key, None)  # another one may get this id
            self._windows.append(window)
            self._registered += 1
            self._groups = 0
            self.count += 1
        return window

    def introduce(self, hook: StepHook) -> None:
        """Tell a hook that was added late of the optimizers, and of the parameters that they train by now."""
        for window in self:
            if (optimizer := window.reference()) is not None:
                hook.registered(optimizer)
                if window.parameters:
                    hook.watched(optimizer, window.trained)

    def of(self, optimizers: Sequence[Optimizer] | None) -> list[Window]:
        """Return the windows of optimizers, with their present parameters. None means all that are registered.

        Raises:
            UsageError: the script has changed gradients since the last backward, or an optimizer has parameters of no
                prepared module, or none is registered.
        """
        if optimizers is None:
            if not self._of:
                raise UsageError(
                    "backward() was called without an optimizer, and none was prepared: pass one to either."
                )
            optimizers = self.optimizers
        windows = []
        for optimizer in optimizers:
            window = self._of.get(id(optimizer)) or self.register(optimizer)
            if window.witness is not None:
                self._check_gradients(window)
            # With one optimizer in one process, frozen parameters need not be left out: they have no gradient.
            if self._averaged or self.count > 1 or len(optimizer.param_groups) != self._groups:
                self._follow(window, optimizer)
            windows.append(window)
        if self._shares:
            self._check_partners(windows)
            self.separate(windows)
        return windows

    def _check_partners(self, windows: list[Window]) -> None:
        """Raise UsageError if some of the gradients that an optimizer accumulates belong to others as well."""
        for window in windows:
            partners = window.shared.rivals.keys() & set(windows)
            if window.is_open and partners != window.shared.partners:
                rival = next(iter(partners ^ window.shared.partners))
                parameter = self._prepared.name(window.shared.rivals[rival][0])
                raise UsageError(
                    f"{window.name} and {rival.name} share {parameter}, and some "
                    "losses of this accumulation window are for both, others for one of them: pass both to every "
                    "backward() of a window, or never, or add the losses."
                )
            window.shared.partners = partners

    def separate_for_update(self, window: Window) -> None:
        """``separate`` for an update of one optimizer, which may move no weights that only other optimizers share.

        Raises:
            UsageError: the gradients that another one has accumulated would be of other weights than those to come.
        """
        for rival, shared in window.shared.rivals.items():
            if rival.micro_batches and rival not in window.shared.partners and len(shared) == len(window.trained):
                raise UsageError(
                    f"{window.name} would move the weights after micro-batch {rival.micro_batches} of {rival.name}'s "
                    "accumulation window, which is to have the gradients of all its micro-batches at the same weights: "
                    "call step() with all micro-batches of a window for one of them, then with all for the other, and "
                    "pass the batch to each, as in sharpness-aware minimisation on the page on methods of training."
                )
        self.separate([window])

    def separate(self, windows: list[Window]) -> None:
        """Give parameters that several optimizers share the gradients of these windows, for a backward or an update.

        The gradients of other windows are kept, and wait for their turn. Collective.
        """
        for window in windows:
            for rival, shared in window.shared.rivals.items():
                if rival.is_open and rival not in windows:
                    self._complete(rival)
                    if rival.keep(shared) and rival not in window.shared.partners:
                        window.drop(shared)
        for window in windows:
            window.restore()

    def _check_gradients(self, window: Window) -> None:
        # With several optimizers, DDP moves gradients of one into its buckets during a backward for another.
        if not self._moves_gradients or self.count == 1:
            window.check_gradients()

    def _follow(self, window: Window, optimizer: Optimizer) -> None:
        """Update the window's parameters after changes of the optimizer's groups, or of ``requires_grad``."""
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if len(trained) != len(window.trained) or not all(map(is_, trained, window.trained)):
            self._watch(window, optimizer, trained)

    def _watch(self, window: Window, optimizer: Optimizer, trained: list[Parameter]) -> None:
        """Tell everyone who keeps something for each parameter that an optimizer trains others now."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._prepared.check(parameters)
        if self._averaged:
            window.evidence.watch(trained)
        for watched in self._hooks.watched:
            watched(optimizer, trained)
        if self.count > 1:
            self._find_rivals(window, trained)
        # Last: if there is no memory for buckets, the next call makes them.
        window.watch(parameters, trained)
        self._groups = len(optimizer.param_groups)

    def _find_rivals(self, window: Window, trained: list[Parameter]) -> None:
        """Find the optimizers that train some of these parameters, too, and keep their gradients."""
        known = set(trained)
        for rival in self:
            shared = [p for p in rival.trained if p in known]
            if rival is window or not shared:
                continue
            self._shares = True
            window.shared.rivals[rival] = rival.shared.rivals[window] = shared
            if rival.is_open:
                self._complete(rival)
                rival.keep(shared)

    def close(self) -> None:
        """Remove the hooks of all windows."""
        for window in self._windows:
            window.evidence.close()
