"""The accumulation windows of all optimizers. Their parameters follow the changes of a script to an optimizer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import is_
from weakref import WeakSet, finalize, ref

from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.errors import UsageError
from unitrain.training.gradients.evidence import Evidence
from unitrain.training.hooks import Hooks, StepHook
from unitrain.training.models.prepared import PreparedModules, present
from unitrain.training.windows.weights import Total
from unitrain.training.windows.window import Window


class Windows:
    """Makes a window for each optimizer, and keeps its parameters up to date when the script changes them.

    Iterating yields the windows, in the order in which their optimizers were registered.

    Attributes:
        count: number of windows, an attribute since each step asks for it.
        take: as the argument.
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
        take: Callable[[Window], None],
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
            take: ends a window with gradients that the script has set, without a backward.
        """
        self._communicator, self._pulse = communicator, communicator.collectives.pulse
        self._backend, self._prepared, self._hooks = backend, prepared, hooks
        self._total = total
        self._averaged = averaged
        self._moves_gradients = moves_gradients
        self._all_gradients = all_gradients
        self._complete = complete
        self.take: Callable[[Window], None] = take
        self._shares = False  # whether optimizers share parameters
        self._windows: list[Window] = []
        self._of: dict[int, Window] = {}  # by the id of an optimizer that exists
        self._dropped: WeakSet[Optimizer] = WeakSet()  # by another rank
        self._registered = 0  # ever
        self._groups = 0  # of the optimizer, if it is the only one
        self.count: int = 0

    def __iter__(self) -> Iterator[Window]:
        return iter(self._windows)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that exist on this rank, of the trial if one is in progress. Ranks free dropped ones apart."""
        windows = [window for window in self if window.trial == self._pulse.trial]
        return [optimizer for window in windows if (optimizer := window.reference()) is not None]

    def _of_ended_trial(self, window: Window) -> bool:
        """Return whether the optimizer of a window is to be forgotten: its trial has ended, and it is in no other."""
        # With the separator: "fold-10" is not in "fold-1".
        return bool(window.trial) and not f"{self._pulse.trial}/".startswith(f"{window.trial}/")

    def on_all_ranks(self, *, modules_too: bool = False) -> list[Optimizer]:
        """Return the optimizers that no rank has freed, and forget all others, and their parameters. Collective.

        Args:
            modules_too: forget dropped modules even if no optimizer is gone.
        """
        optimizers = present(self._communicator, [window.reference for window in self])
        optimizers = [None if self._of_ended_trial(w) else each for w, each in zip(self, optimizers, strict=True)]
        gone = [window for window, optimizer in zip(self, optimizers, strict=True) if optimizer is None]
        for window in gone:
            if window.is_open:  # it was dropped after a backward: another one may train its parameters next
                with suppress(UsageError):  # DDP's wrapper is gone: it has averaged within the backward
                    self._complete(window)
                window.clear()
            window.evidence.close()
            for rival in window.shared.rivals:
                del rival.shared.rivals[window]
                rival.shared.partners.discard(window)
        for key in [key for key, window in self._of.items() if window in gone]:
            del self._of[key]
        self._dropped.update(filter(None, (window.reference() for window in gone)))  # those that this rank has still
        self._windows = [window for window in self if window not in gone]
        self.count, self._groups = len(self._windows), 0
        existing = [optimizer for optimizer in optimizers if optimizer is not None]
        if gone or modules_too:  # not at the end of most epochs
            kept = {p for module in self._prepared.on_all_ranks(self._communicator) for p in module.parameters()}
            kept.update(p for optimizer in existing for group in optimizer.param_groups for p in group["params"])
            self._prepared.keep(kept)
            self._backend.keep(kept)
            for keep in self._hooks.keep:
                keep(existing, kept)
        return existing

    def forget_dropped(self) -> None:
        """Forget the modules and optimizers that the script has dropped, and their parameters. Collective."""
        gc.collect()  # which torch's wrappers, and optimizers with a scheduler, need to be freed
        self.on_all_ranks(modules_too=True)

    @property
    def any_open(self) -> bool:
        """Whether an optimizer has gradients of a window that is not complete."""
        return any(window.is_open and not self._of_ended_trial(window) for window in self._windows)

    def remember_gradients(self) -> None:
        """Notice changes that the script makes to gradients before ``update``."""
        for window in self:
            if window.last is not None:
                window.remember_gradients()

    def of_update(self, optimizer: Optimizer) -> Window:
        """Return the window of an optimizer that is to complete a micro-batch. Collective if that ends it.

        Raises:
            UsageError: it had no backward and has no gradients, or the script has changed them since.
        """
        window = self._of.get(id(optimizer))
        if window is None or window.last is None:
            window = self._take_gradients(optimizer)
        if window.last and window.witness is not None:
            self._check_gradients(window)
        return window

    def _take_gradients(self, optimizer: Optimizer) -> Window:
        """Take the gradients that the script has set for an optimizer, and return its window."""
        gradients = [(p, p.grad) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
        if optimizer in self._dropped or all(gradient is None for _, gradient in gradients):
            raise UsageError(
                f"update() was called without a backward() before it, and the {type(optimizer).__name__} has no "
                "gradients that the script has set, on this rank; or another rank has dropped this optimizer."
            )
        window = self.register(optimizer)
        self._follow(window, optimizer)
        for parameter, gradient in gradients:
            parameter.grad = gradient  # that of a parameter which the window did not have before was dropped
        self.take(window)
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
            sharding, key = self._backend.sharding, id(optimizer)
            evidence = Evidence(all_gradients=self._all_gradients, leaf=sharding.leaf)
            total, trial = self._total(name), self._pulse.trial
            window = self._of[key] = Window(ref(optimizer), name, evidence, total, sharding, trial)
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
            self._separate(windows)
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
        """Do as ``_separate`` for the update of an optimizer, which may move no weights that only others share.

        Raises:
            UsageError: the gradients that another one has accumulated would be of other weights than those to come.
        """
        for rival, shared in window.shared.rivals.items():
            if rival.micro_batches and rival not in window.shared.partners and len(shared) == len(window.trained):
                raise UsageError(
                    f"{window.name} would move the weights after micro-batch {rival.micro_batches} of {rival.name}'s "
                    "accumulation window, which is to have the gradients of all its micro-batches at the same weights: "
                    "call step() with all micro-batches of a window for one of them, then with all for the other, and "
                    "pass the batch to each. For sharpness-aware minimisation, pass a closure to update()."
                )
        self._separate([window])

    def _separate(self, windows: list[Window]) -> None:
        """Give parameters that several optimizers share the gradients of these windows, for a backward or an update.

        The gradients of other windows are kept, and wait for their turn. Collective.
        """
        for window in windows:
            for rival, shared in window.shared.rivals.items():
                if rival.is_open and rival not in windows:
                    self._complete(rival)
                    if rival.keep(shared) and rival not in window.shared.partners:
                        window.sharding.drop_gradients(shared)
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


def version_of(optimizer: Optimizer) -> int:
    """Return how often the parameters of an optimizer were changed in place: its steps do that."""
    return sum(p._version for group in optimizer.param_groups for p in group["params"])
