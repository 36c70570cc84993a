"""Compares the records of a world's ranks with the plain loop's."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unitrain.testing.parity.cases import Case, Trace


@dataclass(frozen=True)
class Verdict:
    """The deviations of one case in one world from the plain loop.

    Attributes:
        world: the launcher and the number of processes.
        backend: the name of the backend.
        case: the case.
    """

    world: str
    backend: str
    case: Case
    loss: float = math.nan
    """Largest deviation of the loss of a step over all ranks."""
    gradient: float = math.nan
    """Largest deviation of an element of the gradients of a step."""
    weight: float = math.nan
    """Largest deviation of an element of the final weights and buffers."""
    problems: tuple[str, ...] = ()
    """Other problems: samples trained twice or left out, ranks that differ, a run that failed."""

    @property
    def passed(self) -> bool:
        """Whether all deviations are within the tolerance, and there are no problems."""
        deviations = (self.loss, self.gradient, self.weight)
        return not self.problems and all(d <= self.case.tolerance for d in deviations)

    def __str__(self) -> str:
        """Return the deviations and problems, in one line."""
        largest = f"loss {self.loss:.1e}, gradient {self.gradient:.1e}, weight {self.weight:.1e}"
        deviations = f"{largest}, allowed {self.case.tolerance:.0e}"
        return f"{self.world}, {self.backend}, {self.case.name}: {'; '.join([deviations, *self.problems])}"


def compare(world: str, backend: str, case: Case, plain: Trace, ranks: Sequence[Trace]) -> Verdict:
    """Compare the records of a world's ranks with the plain loop's.

    Args:
        world: the world, for the verdict.
        backend: the name of its backend.
        case: the case that was trained.
        plain: the record of the plain loop.
        ranks: the records of the ranks, in order.
    """
    problems = [*_samples(plain, ranks), *_norms(case, plain, ranks)]
    problems += [
        f"the weights of rank {rank} differ from rank 0's"
        for rank, trace in enumerate(ranks)
        if any(not torch.equal(trace.weights[name], value) for name, value in ranks[0].weights.items())
    ]
    return Verdict(
        world,
        backend,
        case,
        loss=_losses(plain, ranks),
        gradient=_largest(plain.gradients, ranks[0].gradients),
        weight=_largest(list(plain.weights.values()), list(ranks[0].weights.values())),
        problems=tuple(problems),
    )


def cause(output: str) -> str:
    """Return the first line of an output that contains an error message, else the last line."""
    lines = [line.strip() for line in output.splitlines() if any(c.isalnum() for c in line)]
    return next(
        (line for line in lines if re.search(r"\w(Error|Exception)\b.*: |^unitrain: ", line)),
        (lines or ["no output"])[-1],
    )


def _samples(plain: Trace, ranks: Sequence[Trace]) -> list[str]:
    """Return a problem if the ranks together did not train on the samples of the plain loop, each once."""
    for step, expected in enumerate(plain.samples):
        seen = Counter(i for trace in ranks for i in trace.samples[step])
        # As multisets: the ranks may have the samples in any order.
        if seen != Counter(expected):
            twice = sorted((seen - Counter(expected)).elements())
            missed = sorted((Counter(expected) - seen).elements())
            return [f"step {step}: samples trained too often {twice}, left out {missed}"]
    return []


def _norms(case: Case, plain: Trace, ranks: Sequence[Trace]) -> list[str]:
    """Return a problem if ``grad_norm`` on a rank differs from the plain loop."""
    for rank, trace in enumerate(ranks):
        if len(trace.norms) != len(plain.norms):
            return [f"rank {rank} got grad_norm in {len(trace.norms)} steps, not in {len(plain.norms)}"]
        for step, (expected, norm) in enumerate(zip(plain.norms, trace.norms, strict=True)):
            if not math.isclose(norm, expected, rel_tol=case.tolerance):
                return [f"step {step}: grad_norm is {norm} on rank {rank}, not {expected}"]
    return []


def _losses(plain: Trace, ranks: Sequence[Trace]) -> float:
    """Return the largest deviation of a step's mean loss, weighted over ranks and micro-batches."""
    batches = len(ranks[0].losses)
    totals = [sum(t.losses[i][0] * t.losses[i][1] for t in ranks) for i in range(batches)]
    weights = [sum(t.losses[i][1] for t in ranks) for i in range(batches)]
    worst, batch = 0.0, 0
    for loss, weight in plain.losses:
        # A batch of the plain loop is one of each rank, or several with accumulation: as many as have its weight.
        total = seen = 0.0
        while seen < weight and batch < batches:
            total, seen, batch = total + totals[batch], seen + weights[batch], batch + 1
        worst = max(worst, abs(total / seen - loss) if seen else math.inf)
    return worst


def _largest(expected: Sequence[Tensor], recorded: Sequence[Tensor]) -> float:
    """Return the largest deviation of an element; infinite if tensors are missing, or have another shape or NaNs."""
    if [e.shape for e in expected] != [f.shape for f in recorded]:
        return math.inf
    pairs = zip(expected, recorded, strict=True)
    # Empty tensors have no largest element.
    worst = max((float((e - f).abs().max()) for e, f in pairs if e.numel()), default=0.0)
    # max() of NaNs depends on their order.
    return math.inf if math.isnan(worst) else worst
