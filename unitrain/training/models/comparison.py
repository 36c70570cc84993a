"""Checks that all ranks prepare the same models and optimizers: ranks exchange a hash, and details if it differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import difference_between_ranks
from unitrain.errors import CommunicationError
from unitrain.training.models.prepared import PreparedModules

_SAME = (
    "Make the same optimizer on every rank, and step a ReduceLROnPlateau with the same metric, as a meter's value()."
)


def check_models(communicator: Communicator, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise CommunicationError on every rank if names, shapes, dtypes or ``requires_grad`` differ. Collective."""
    facts = {
        f"tensor {i}": f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} "
        f"requires_grad={tensor.requires_grad}"
        for i, (name, tensor) in enumerate(named)
    }
    _check(communicator, facts, "models", "Build the same model on every rank, and freeze the same layers.")


def check_optimizers(
    communicator: Communicator, prepared: PreparedModules, optimizer: Optimizer, *, options: bool
) -> None:
    """Raise CommunicationError on every rank if an optimizer's class or parameter groups differ. Collective.

    Names of parameters are compared in their order, which optimizers count their state by.

    Args:
        communicator: of this process.
        prepared: knows the names of parameters.
        optimizer: the optimizer.
        options: compare the options of the groups (learning rate, momentum) as well.
    """
    facts = {"the class": type(optimizer).__name__}
    for i, group in enumerate(optimizer.param_groups):
        # By name, as parameters themselves can't be compared: each rank has its own objects.
        names = [prepared.name(parameter) for parameter in group["params"]]
        facts.update({f"parameter {j} of parameter group {i}": name for j, name in enumerate(names)})
        if options:
            facts.update(
                {f"{key} of parameter group {i}": _plain(group[key]) for key in sorted(group) if key != "params"}
            )
    _check(communicator, facts, "optimizers", _SAME)


def _plain(value: Any) -> str:
    """Return a text that is the same for the same option on every rank: no address, as a repr may have one."""
    if isinstance(value, Tensor):
        return str(value.tolist())  # of a learning rate for a compiled step, say
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _check(communicator: Communicator, facts: Mapping[str, str], kind: str, remedy: str) -> None:
    """Raise CommunicationError with the first fact that differs. Ranks send a hash first, and facts if it differs."""
    difference = difference_between_ranks(communicator, facts)
    if difference is not None:
        raise CommunicationError(f"the {kind} of the ranks differ: {difference[0]} is {difference[1]}. {remedy}")
