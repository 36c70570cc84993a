"""Where features plug into training: the core calls these classes, and names no feature."""

from __future__ import annotations

from torch import Tensor

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.training.hooks import Hooks
from unitrain.training.loop.averaging import Averaging, GradientAveraging, Replicas
from unitrain.training.loop.batches import OpenBatches
from unitrain.training.loop.judge import Verdict
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.state_parts import MakePart, States


class Sockets:
    """What a feature may use (the first five), and what it plugs into.

    Attributes:
        communicator: of this process.
        backend: of the run.
        prepared: the modules that were prepared.
        config: the settings.
        batches: the batches that loaders have yielded.
        hooks: what happens around the steps.
        averaging: how gradients are averaged. A feature may replace it before the first step.
        replicas: whether the ranks have one model. A feature may replace it before the first step.
        verdicts: what may forbid a step.
        parts: makes what checkpoints have in files of their own.
        states: small states by name, which checkpoints have with that of the run.
        followers: tensors that follow the weights, such as averages of them: what puts weights back takes these along.
    """

    def __init__(
        self,
        communicator: Communicator,
        backend: Backend,
        prepared: PreparedModules,
        config: StrategyConfig,
    ) -> None:
        self.communicator: Communicator = communicator
        self.backend: Backend = backend
        self.prepared: PreparedModules = prepared
        self.config: StrategyConfig = config
        self.batches: OpenBatches = OpenBatches()
        self.hooks: Hooks = Hooks()
        self.averaging: Averaging = (
            GradientAveraging(communicator, backend, config) if communicator.world_size > 1 else Averaging()
        )
        self.replicas: Replicas = Replicas()
        self.verdicts: list[Verdict] = []
        self.parts: list[MakePart] = []
        self.states: States = States()
        self.followers: list[Tensor] = []
