"""What a checkpoint of a run has: the state of its objects by name, and of the run itself."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.checkpoint.names import LEGACY, Name, names_of
from unitrain.checkpoint.store.manifest import METRICS, RUN
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.errors import UsageError
from unitrain.training.models.prepared import PreparedModules


class RunState:
    """The state of a run.

    Args:
        objects: objects by name, with ``state_dict`` and ``load_state_dict``, or dicts of plain values and tensors.
        prepared: gives the original modules of prepared ones.
        scaler: the GradScaler of fp16, else None.
        communicator: the communicator of this process.
        settings: the strategy's settings.
        config: the script's settings, as plain data.

    Attributes:
        objects: as given.
        prepared: as given.
        settings: as given.
        config: as given.

    Raises:
        UsageError: an object has no state, or its name can't be that of a file.
    """

    def __init__(
        self,
        objects: dict[str, Any],
        prepared: PreparedModules,
        scaler: torch.amp.GradScaler | None,
        communicator: Communicator,
        settings: StrategyConfig,
        config: Mapping[str, Any],
    ) -> None:
        for name, value in objects.items():
            if not isinstance(value, dict) and not callable(getattr(value, "load_state_dict", None)):
                raise UsageError(
                    f"checkpoint: {name} is a {type(value).__name__}, which has no load_state_dict: pass an object "
                    "with state_dict and load_state_dict, or a dict."
                )
            if name in (RUN, METRICS, "") or name.startswith(LEGACY) or "/" in name or "\0" in name:
                raise UsageError(f"checkpoint: {name!r} can't be the name of an object, which is that of a file, too.")
        self.objects: dict[str, Any] = objects
        self.prepared: PreparedModules = prepared
        self._scaler = scaler
        self._world_size = communicator.world_size
        self.settings: StrategyConfig = settings
        self.config: dict[str, Any] = dict(config)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The original modules."""
        named = self.objects.items()
        return {name: self.prepared.unwrap(value) for name, value in named if isinstance(value, nn.Module)}

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers."""
        return {name: value for name, value in self.objects.items() if isinstance(value, Optimizer)}

    @property
    def names(self) -> dict[str, list[Name] | None]:
        """The names of the parameters of each optimizer."""
        return {name: names_of(value, self.modules) for name, value in self.optimizers.items()}

    @property
    def nbytes(self) -> int:
        """Size of the modules' states."""
        tensors = [t for module in self.modules.values() for t in module.state_dict().values()]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))

    def of(self, value: Any) -> Any:
        """Return the state of one of the objects."""
        if isinstance(value, nn.Module):
            return self.prepared.unwrap(value).state_dict()
        return value if isinstance(value, dict) else value.state_dict()

    def parts(self) -> dict[str, Any]:
        """Return the states of all objects."""
        return {name: self.of(value) for name, value in self.objects.items()}

    def run(self, steps: int, random: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of the run itself, given the states of the random number generators of each rank."""
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return {"steps": steps, "scaler": scaler, "random": random, "names": self.names}

    def load_scaler(self, state: dict[str, Any] | None) -> None:
        """Load the state of the GradScaler, if there is one."""
        if self._scaler is not None and state is not None:
            self._scaler.load_state_dict(state)

    def about(self, best: int | None) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says, given the step of the best one."""
        return {
            "best": best,
            "unitrain": version("unitrain"),
            "torch": torch.__version__,
            "world_size": self._world_size,
            "strategy": self.settings.model_dump(mode="json"),
            "config": self.config,
        }
