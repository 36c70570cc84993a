"""Checks that all ranks prepare the same models and optimizers, and that these stay the same.

Ranks compare a hash of facts on what they prepare, and the facts if it differs. Later they compare the values of
parameters and buffers, by one gather of checksums. Every training epoch ends with that, and with a comparison of the
optimizers' options: ranks that have drifted apart would average gradients of different models. Parameters are compared
after the first step, too, when they differ by a few units in the last place at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import difference_between_ranks
from unitrain.errors import CommunicationError
from unitrain.training.hooks import StepHook
from unitrain.training.models.batch_norm import is_unsynchronised
from unitrain.training.models.prepared import PreparedModules

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**20
_CHUNK_IN_CACHE = 2**14  # ten times as fast on a CPU
_ROUNDING = 1e-3
_UNITS = 64  # in the last place: by how much a first step may be rounded differently, on processors of two kinds
_SAME = (
    "Make the same optimizer on every rank, and step a ReduceLROnPlateau with the same metric, as a meter's value()."
)
_FACTOR = 6364136223846793005  # odd; of a linear congruential generator (Knuth)


@dataclass(eq=False)
class InSyncCheck(StepHook):
    """Checks all prepared models, and the options of all optimizers, at the end of each training epoch.

    Attributes:
        communicator: of this process.
        prepared: the prepared modules.
        optimizers: returns the optimizers of the run, in the same order on all ranks; collective.
    """

    communicator: Communicator
    prepared: PreparedModules
    optimizers: Callable[[], list[Optimizer]]

    def after_first_step(self) -> None:
        """Check the parameters. Buffers may differ within an epoch. Collective."""
        for module in self.prepared:
            check_in_sync(self.communicator, self.prepared.unwrap(module), tolerance=None, buffers=False)

    def at_epoch_end(self) -> None:
        """Check the models and the optimizers. Collective."""
        # First: other options are why the models differ.
        for optimizer in self.optimizers():
            check_optimizers(self.communicator, self.prepared, optimizer, options=True)
        for module in self.prepared.on_all_ranks(self.communicator):
            check_in_sync(self.communicator, self.prepared.unwrap(module), tolerance=_ROUNDING)


@torch.no_grad()
def check_in_sync(
    communicator: Communicator, module: nn.Module, tolerance: float | None = 0.0, *, buffers: bool = True
) -> None:
    """Check that all ranks have the same parameters and buffers. See ``Strategy.check_in_sync``. Collective.

    Sharded tensors, and the statistics of BatchNorm layers that are not synchronised, are left out.

    Args:
        communicator: of this process.
        module: the original module, without wrappers.
        tolerance: largest difference, as a part of a tensor's maximum, that is a warning instead of an error;
            None for a few units in the last place.
        buffers: check buffers as well.

    Raises:
        CommunicationError: a tensor differs; on every rank.
    """
    local = {buffer for layer in module.modules() if is_unsynchronised(layer) for buffer in layer.buffers()}
    tensors = (*module.named_parameters(), *(module.named_buffers() if buffers else ()))
    named = [(name, t) for name, t in tensors if t not in local and not communicator.sharding.is_sharded(t)]
    advice = (
        "It was changed on some ranks only: by a step outside strategy.step, by random numbers that differ between "
        "ranks, or by loading weights on one rank."
    )
    compare_tensors(communicator, named, "the ranks' models differ", advice, tolerance)


@torch.no_grad()
def compare_tensors(
    communicator: Communicator,
    named: Sequence[tuple[str, Tensor]],
    problem: str,
    advice: str,
    tolerance: float | None = None,
) -> None:
    """Compare tensors that all ranks have whole, with the same names and forms, between the ranks. Collective.

    Args:
        communicator: of this process.
        named: the tensors, and their names in messages.
        problem: begins the message.
        advice: ends it.
        tolerance: as in ``check_in_sync``.

    Raises:
        CommunicationError: a tensor differs; on every rank.
    """
    if communicator.world_size == 1 or not named:
        return
    checksums = torch.stack([_checksum(tensor).to(communicator.device) for _, tensor in named])
    of_ranks = communicator.all_gather(checksums).cpu()  # of shape (ranks, tensors)
    rounded = ""
    differing = (of_ranks != of_ranks[0]).any(dim=0).tolist()
    for i, (name, tensor) in enumerate(named):
        if not differing[i]:
            continue
        ranks = [rank for rank in range(1, communicator.world_size) if of_ranks[rank, i] != of_ranks[0, i]]
        text = f"{name} {tuple(tensor.shape)} of rank {', '.join(map(str, ranks))} is not that of rank 0"
        limit = _UNITS * torch.finfo(tensor.dtype).eps if tolerance is None else tolerance
        if limit and (distance := _distance(communicator, tensor)) <= limit:
            rounded = f"{text}, by up to {distance:.0e} of its largest element"
            continue
        raise CommunicationError(f"{problem}: {text}. {advice}")
    if rounded:
        communicator.warn(
            f"{problem} slightly: {rounded}. That is rounding if their processors are of different "
            "kinds; if not, something changes the weights on some ranks only."
        )


def _distance(communicator: Communicator, tensor: Tensor) -> float:
    """Return the largest difference of any rank's tensor to rank 0's, relative to its largest element. Collective."""
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().to(communicator.device).double()
    expected = communicator.broadcast(values)
    largest = (values - expected).abs().max() / expected.abs().max()
    return float(communicator.all_gather(largest).nan_to_num(math.inf).max())


def _checksum(tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum of a tensor's bits, which depends on their positions, on its device."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = plain.detach().contiguous().reshape(-1).view(_BITS[plain.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    parts = torch.split(bits, _CHUNK_IN_CACHE if tensor.is_cpu else _CHUNK)
    # Odd multipliers, spread by the golden ratio, also detect swaps, and changes that cancel in a plain sum.
    odd = torch.arange(len(parts[0]), device=tensor.device) * -7046029254386353131 | 1
    for part in parts:
        total = total * _FACTOR + (part * odd[: len(part)]).sum()
    return total


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
