"""Where features plug into training: the core calls these classes, and names no feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unitrain.communication.backend import Backend
from unitrain.communication.batch_group import BatchGroup
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.job.watch.stopping import Stopping
from unitrain.training.hooks import Hooks
from unitrain.training.loop.averaging import Averaging, GradientAveraging, Replicas
from unitrain.training.loop.batches import OpenBatches
from unitrain.training.loop.checks import CopyCheck
from unitrain.training.loop.judge import Verdict
from unitrain.training.models.passes import ModulePass
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.state_parts import MakePart, States


class WayBack(Protocol):
    """Keeps earlier states of the run, to which weights can go back while the training continues."""

    def go_back(self, newest: int) -> int | None:
        """Put weights and optimizers back as they were after the last kept step up to step ``newest``.

        The options of optimizers, such as the learning rate, stay. Collective; between two steps.

        Args:
            newest: number of a step.

        Returns:
            The step; None if none is kept that is so old.
        """


@dataclass(eq=False)
class Sockets:
    """The parts of a run that a feature may use (the first eight), and those that it plugs into.

    Attributes:
        communicator: of this process.
        backend: of the run.
        prepared: the modules that were prepared.
        config: the settings.
        stopping: does what a feature requests on all ranks at the same boundary (``add_action``, ``request``).
        batches: the batches that loaders have yielded.
        readers: the ranks that read different batches; all of them, unless ``share_batches`` was called.
        batch_group: the ranks that have the batches of this rank.
        hooks: what happens around the steps.
        passes: what ``prepare`` changes of modules.
        averaging: how gradients are averaged. A feature of the settings may replace it; ``strategy.add`` refuses that.
        replicas: whether the ranks have one model. The same holds for it.
        verdicts: what may forbid a step.
        parts: makes the parts that checkpoints have as separate files.
        states: small states by name, which checkpoints have with that of the run.
        ways_back: what can put an earlier state back.
        goes_back: how many steps a feature wants to be able to go back, at least; 0 for none.
    """

    communicator: Communicator
    backend: Backend
    prepared: PreparedModules
    config: StrategyConfig
    stopping: Stopping
    batches: OpenBatches = field(default_factory=OpenBatches)
    hooks: Hooks = field(default_factory=Hooks)
    passes: list[ModulePass] = field(default_factory=list)
    averaging: Averaging = field(default_factory=Averaging)
    replicas: Replicas = field(default_factory=Replicas)
    verdicts: list[Verdict] = field(default_factory=list)
    parts: list[MakePart] = field(default_factory=list)
    states: States = field(default_factory=States)
    ways_back: list[WayBack] = field(default_factory=list)
    goes_back: int = 0

    def __post_init__(self) -> None:
        self.readers: Communicator = self.communicator
        self.batch_group: BatchGroup = BatchGroup()
        # A single process keeps the default, whose methods do nothing.
        if self.communicator.world_size > 1:
            self.averaging = GradientAveraging(self.communicator, self.backend, self.config, self.passes)

    def share_batches(self, groups: Sequence[Sequence[int]]) -> None:
        """Have the ranks of each group read the same batches. Collective; for features of the settings.

        Args:
            groups: of the same size, in the order in which they read, as in ``Communicator.part``.
        """
        self.batch_group = BatchGroup(self.communicator.part(groups))
        self.readers = self.communicator.part([*zip(*groups, strict=True)])
        if isinstance(self.averaging, GradientAveraging):
            self.averaging.copies = CopyCheck(self.readers)
