"""What a checkpoint of a run has (the state of its objects by name, and of the run itself), and whether one fits."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.checkpoint.names import GROUPS, PARAMS, Name, names_of
from unitrain.checkpoint.store.located import METRICS, RUN, Manifest, is_extra
from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import Form
from unitrain.config import StrategyConfig, flattened
from unitrain.data import Loader
from unitrain.errors import CheckpointError, UsageError
from unitrain.training.loop.sockets import Sockets
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.state_parts import StatePart

# Settings that must not change when a run is resumed. Launcher, backend, world size and timeouts may.
_TRAINING_SETTINGS = ("seed", "precision", "sync_batchnorm", "clip_norm", "clip_value", "compression")
# What schedulers of a cycle change beside the learning rate.
_CYCLED = ("momentum", "betas")


class RunState:
    """The state of a run: of objects by name, with ``state_dict`` and ``load_state_dict``, or dicts of plain data."""

    def __init__(
        self,
        objects: dict[str, Any],
        sockets: Sockets,
        scaler: torch.amp.GradScaler | None,
        config: Mapping[str, Any],
    ) -> None:
        for name, value in objects.items():
            if not isinstance(value, dict) and not callable(getattr(value, "load_state_dict", None)):
                raise UsageError(
                    f"checkpoint: {name} is a {type(value).__name__}, which has no load_state_dict: pass an object "
                    "with state_dict and load_state_dict, or a dict."
                )
            if name in (RUN, METRICS, "") or is_extra(name) or "/" in name or "\0" in name:
                raise UsageError(f"checkpoint: {name!r} can't be the name of an object, which is that of a file, too.")
        self.objects: dict[str, Any] = objects
        self.prepared: PreparedModules = sockets.prepared
        self.extra: list[StatePart] = sockets.parts
        self._scaler, self._states, self._resumed = scaler, sockets.states, sockets.resumed
        self._world_size = sockets.communicator.world_size
        self.settings: StrategyConfig = sockets.config
        self.config: dict[str, Any] = dict(config)
        self.life: int = 0  # see ``Manifest.life``

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

    def complete_shards(self, ranks: Communicator, parts: Mapping[str, Any]) -> None:
        """Complete the states of loaders of iterable datasets, of which each rank has its shards only. Collective."""
        names = [name for name, value in self.objects.items() if isinstance(value, Loader) and "seeks" in parts[name]]
        if ranks.world_size == 1 or not names:
            return
        gathered = ranks.all_gather_object([parts[name]["seeks"] for name in names])
        for name, *of_ranks in zip(names, *gathered, strict=True):
            of_kinds = zip(*(of_rank[1:] for of_rank in of_ranks), strict=True)
            found = [{tuple(one[:2]): one for shards in kind for one in shards} for kind in of_kinds]
            parts[name]["seeks"] = [of_ranks[0][0], *(list(one.values()) for one in found)]

    def run(self, steps: int, random: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of the run itself, given the states of the random number generators of each rank."""
        scaler = None if self._scaler is None else self._scaler.state_dict()
        states = self._states.collect()
        return {"steps": steps, "scaler": scaler, "features": states, "random": random, "names": self.names}

    def load_run(self, state: Mapping[str, Any]) -> None:
        """Load the state of the GradScaler, and of features, that ``run`` has returned, if they are used."""
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])
        self._states.load(state.get("features", {}))

    def about(self, best: int | None) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says, given the step of the best one."""
        return {
            "best": best,
            "life": self.life,
            "unitrain": version("unitrain"),
            "torch": torch.__version__,
            "world_size": self._world_size,
            "strategy": self.settings.model_dump(mode="json"),
            "config": self.config,
        }

    def changed_settings(self, manifest: Manifest) -> list[str]:
        """Return the settings that affect training and are not those of a checkpoint, with both values."""
        if not manifest.strategy:
            return []  # of another tool, which has none of them
        own = self.settings.model_dump(mode="json")
        # A loader's global batch does not depend on the number of micro-batches, and it compares that itself.
        loads = any(isinstance(value, Loader) for value in self.objects.values())
        compared = (*_TRAINING_SETTINGS, *self._resumed, *(() if loads else ("accumulate",)))
        saved, own = flattened(manifest.strategy), flattened(own)
        kept = [name for name in {**own, **saved} if name.partition(".")[0] in compared]
        pairs = [(f"strategy.{name}", saved.get(name), own.get(name)) for name in kept]
        names = dict.fromkeys([*manifest.config, *self.config])
        pairs += [(name, manifest.config.get(name), self.config.get(name)) for name in names]
        return [f"{name} was {before!r} and is now {now!r}" for name, before, now in pairs if before != now]

    def check_fits(self, manifest: Manifest, outlines: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless the outlines of saved states fit this run's objects."""
        # Another tool has saved modules and optimizers only.
        objects = self.objects if manifest.files else {**self.modules, **self.optimizers}
        saved = {name for name in outlines if name not in (RUN, METRICS) and not is_extra(name)}
        if set(objects) != saved:
            raise CheckpointError(
                f"the checkpoint contains {', '.join(sorted(saved))}, but this run has {', '.join(sorted(objects))}: "
                "pass the same objects to strategy.checkpoint. Nothing was loaded."
            )
        for name, value in objects.items():
            if isinstance(value, (nn.Module, Optimizer)) and not isinstance(outlines[name], dict):
                raise CheckpointError(
                    f"{name} in the checkpoint is a {type(outlines[name]).__name__}, and no state. Nothing was loaded."
                )
            if isinstance(value, nn.Module):
                _compare_tensors(name, self.of(value), outlines[name])
            elif isinstance(value, Optimizer):
                _compare_groups(name, value.param_groups, outlines[name].get(GROUPS, []))

    def replaced_options(self, outlines: Mapping[str, Any]) -> list[str]:
        """Return which options of the script's optimizers the outlines of a checkpoint replace, for a message.

        What a scheduler changes is left out, since it differs from the first value in any case.
        """
        replaced = []
        for name, optimizer in self.optimizers.items():
            for ours, theirs in zip(optimizer.param_groups, outlines[name][GROUPS], strict=True):
                scheduled = ["lr"] if "initial_lr" in ours else []
                cycled = _CYCLED if "max_momentum" in ours else []
                for key in ours.keys() & theirs.keys() - {PARAMS, *scheduled, *cycled}:
                    before, now = theirs[key], ours[key]
                    if not isinstance(before, (Tensor, Form)) and not isinstance(now, Tensor) and before != now:
                        replaced.append(f"{name}'s {key} is {before!r}, not {now!r}")
        return sorted(set(replaced))


def _compare_groups(name: str, own: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    ours, theirs = ([len(group.get("params", [])) for group in groups] for groups in (own, saved))
    if ours != theirs:
        raise CheckpointError(
            f"{name} has parameter groups of {theirs} parameters in the checkpoint, but of {ours} in this run. Nothing "
            "was loaded."
        )


def _compare_tensors(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for key in [*ours, *(k for k in theirs if k not in ours)]:
        mine, other = (_shape(state.get(key)) for state in (ours, theirs))
        if mine != other:
            raise CheckpointError(
                f"the checkpoint belongs to another {name}: {key} is {other} in the checkpoint, but {mine} in this "
                "run. Nothing was loaded."
            )


def _shape(value: Any) -> str:
    if isinstance(value, (Tensor, Form)):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "missing" if value is None else type(value).__name__
