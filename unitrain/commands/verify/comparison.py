"""Deviations between the plain loop and the ranks of one world."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from unitrain.commands.verify.cases import Case
from unitrain.commands.verify.trace import Trace


@dataclass(frozen=True)
class Verdict:
    """How far one case in one world is from the plain loop."""

    world: str
    backend: str
    case: str
    tolerance: float
    loss: float = math.nan
    """Largest deviation of a step's loss over all ranks."""
    gradient: float = math.nan
    """Largest deviation of an element of a step's gradient."""
    weight: float = math.nan
    """Largest deviation of an element of the final weights and buffers."""
    problems: tuple[str, ...] = ()
    """What can't be put in a number: samples trained twice or left out, ranks that differ, a run that failed."""

    @property
    def passed(self) -> bool:
        """Whether every deviation is within the tolerance, and there is no problem."""
        deviations = (self.loss, self.gradient, self.weight)
        return not self.problems and all(d <= self.tolerance for d in deviations)

    def __str__(self) -> str:
        """Return what is wrong with it."""
        numbers = f"loss {self.loss:.1e}, gradient {self.gradient:.1e}, weight {self.weight:.1e}"
        deviations = f"{numbers}, allowed {self.tolerance:.0e}"
        return f"{self.world}, {self.backend}, {self.case}: {'; '.join([deviations, *self.problems])}"

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict for JSON."""
        return {**asdict(self), "passed": self.passed}


def compare(world: str, backend: str, case: Case, plain: Trace, ranks: Sequence[Trace]) -> Verdict:
    """Compare what all ranks of a world wrote down with the plain loop."""
    verdict = Verdict(world, backend, case.name, case.tolerance)
    problems = sorted({cause(t.error) for t in ranks if t.error})
    if problems:
        return Verdict(**{**asdict(verdict), "problems": tuple(problems)})
    problems += _samples(plain, ranks)
    problems += _norms(case, plain, ranks)
    problems += [
        f"rank {rank}'s weights are not rank 0's, bit for bit"
        for rank, trace in enumerate(ranks)
        if any(not torch.equal(trace.weights[name], value) for name, value in ranks[0].weights.items())
    ]
    return Verdict(
        world,
        backend,
        case.name,
        case.tolerance,
        loss=_losses(plain, ranks),
        gradient=_largest(plain.gradients, ranks[0].gradients),
        weight=_largest(list(plain.weights.values()), list(ranks[0].weights.values())),
        problems=tuple(problems),
    )


def cause(text: str) -> str:
    """Return the line of a traceback, or of what a launcher printed, that names an error; else the last one."""
    lines = [line.strip() for line in text.splitlines() if any(c.isalnum() for c in line)]
    return next((line for line in lines if re.search(r"\w(Error|Exception)\b.*: |^unitrain: ", line)), lines[-1])


def _samples(plain: Trace, ranks: Sequence[Trace]) -> list[str]:
    """Say in which step the ranks together did not train on the plain loop's samples, each once."""
    for step, expected in enumerate(plain.samples):
        seen = Counter(i for trace in ranks for i in trace.samples[step])
        if seen != Counter(expected):
            twice = sorted((seen - Counter(expected)).elements())
            missed = sorted((Counter(expected) - seen).elements())
            return [f"step {step}: samples trained once too often {twice}, left out {missed}"]
    return []


def _norms(case: Case, plain: Trace, ranks: Sequence[Trace]) -> list[str]:
    """Say in which step the norm of the gradients that a rank was told is not that of the plain loop."""
    for rank, trace in enumerate(ranks):
        if len(trace.norms) != len(plain.norms):
            return [f"rank {rank} was told the norm of the gradients {len(trace.norms)} times, not {len(plain.norms)}"]
        for step, (expected, found) in enumerate(zip(plain.norms, trace.norms, strict=True)):
            if not math.isclose(found, expected, rel_tol=case.tolerance):
                return [f"step {step}: rank {rank} was told that the norm of the gradients is {found}, not {expected}"]
    return []


def _losses(plain: Trace, ranks: Sequence[Trace]) -> float:
    """Compare the weighted means over ranks and micro-batches of each step's losses."""
    batches = len(ranks[0].losses)
    totals = [sum(t.losses[i][0] * t.losses[i][1] for t in ranks) for i in range(batches)]
    weights = [sum(t.losses[i][1] for t in ranks) for i in range(batches)]
    worst, batch = 0.0, 0
    for loss, weight in plain.losses:
        total = seen = 0.0
        while seen < weight and batch < batches:
            total, seen, batch = total + totals[batch], seen + weights[batch], batch + 1
        worst = max(worst, abs(total / seen - loss) if seen else math.inf)
    return worst


def _largest(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    if [e.shape for e in expected] != [f.shape for f in found]:
        return math.inf
    pairs = zip(expected, found, strict=True)
    worst = max((float((e - f).abs().max()) for e, f in pairs if e.numel()), default=0.0)
    return math.inf if math.isnan(worst) else worst
