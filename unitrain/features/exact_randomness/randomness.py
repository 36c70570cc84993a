"""Random numbers of a forward that depend on the sample, and not on the rank and the batch that it is in.

With ``exact_randomness``, operators that draw random numbers within the forward of a prepared module get other ones.
Row ``i`` of what they draw is a hash of the seed, the epoch, the step, the number of the draw within the forward, and
the place of sample ``i`` in the epoch. So any number of ranks and micro-batches draws the same numbers for a sample.

The number of a draw is itself drawn from torch's CPU generator, which is seeded anew for each forward. Activation
checkpointing restores its state when it runs a block again, which therefore gets the same numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from unitrain.data.order.shares import part_of
from unitrain.device import precise
from unitrain.errors import ConfigError, UsageError
from unitrain.features.exact_randomness.draws import SampleDraw
from unitrain.rng import derived_seed, mixed, seed_torch
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets
from unitrain.training.models.passes import ModulePass
from unitrain.training.models.precision import hook_handles

_SEEDS = 2**62
_aten = torch.ops.aten


class ExactRandomness(Feature, ModulePass):
    """Enters and leaves the mode in which random numbers belong to samples: in forwards, and in their backward."""

    def __init__(self) -> None:
        self._place: tuple[int, int, int, int] | None = None  # seed, epoch, step and start of the micro-batch
        self._forwards = 0  # of this micro-batch
        self._mode = _Mode()  # type: ignore[no-untyped-call]
        self._entered: list[tuple[Tensor, Any] | None] = []

    def plug_in(self, sockets: Sockets) -> None:
        """Plug this into a run.

        Raises:
            ConfigError: its device lacks float64.
        """
        self._device = sockets.communicator.device
        if precise(self._device) != self._device:
            raise ConfigError(
                f"exact_randomness draws numbers in float64, which device {self._device} lacks: set it to cpu."
            )
        self._batches = sockets.batches
        self._rank, self._shares = sockets.communicator.rank, sockets.prepared.shares
        super().plug_in(sockets)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactRandomness:
        """Return this object: a copy of a model is used with the same batches."""
        return self

    def apply(self, module: nn.Module) -> None:
        """Let a module's forwards draw random numbers by sample."""
        for name, layer in module.named_modules():
            drops = isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout > 0
            if drops and (isinstance(layer, nn.RNNBase) or not layer.batch_first):
                what = "dropout=0" if isinstance(layer, nn.RNNBase) else "batch_first=True"
                raise ConfigError(
                    f"exact_randomness needs tensors whose first dimension is the sample, but {name or 'the model'} is "
                    f"a {type(layer).__name__} that drops elements of tensors whose first dimension is time. Make it "
                    f"with {what}, or set exact_randomness to false."
                )
        enter = module.register_forward_pre_hook(self._enter, prepend=True)
        hook_handles(module).extend([enter, module.register_forward_hook(self._leave, always_call=True)])

    def _enter(self, module: nn.Module, args: Any) -> None:
        # Where there is an entry already, the forward of a module runs that this one is a part of.
        if not module.training or any(self._entered):
            self._entered.append(None)
            return
        if not self._mode.in_forward:
            raise UsageError(
                "exact_randomness does not cover checkpointing of a whole prepared module: checkpoint its blocks."
            )
        self._locate()
        self._forwards += 1
        others = _states_of_others()
        self._entered.append((torch.default_generator.get_state(), others))
        seed, epoch, step, _ = self._place or (0, 0, 0, 0)
        # Without the start of the micro-batch: all those of a step draw the same numbers for what has no samples.
        seed_torch(derived_seed("forward", seed, epoch, step, self._forwards))
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        entered = self._entered.pop() if self._entered else None  # empty if another hook raised before
        if entered is None:
            return
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        state, others = entered
        torch.default_generator.set_state(state)
        if output is not None and _states_of_others() != others:  # it is None if the forward has raised
            raise UsageError(
                f"exact_randomness covers torch's random numbers only, but the forward of {type(module).__name__} has "
                "drawn from python's or numpy's: draw from torch's, or set exact_randomness to false."
            )

    def before_call(self, call: str) -> None:
        """Enter the mode for a backward: activation checkpointing runs parts of the forward again."""
        self._locate()
        self._mode.in_forward = False
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def before_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Leave an optimizer's own random numbers as they are."""
        self._mode.in_update = True

    def after_call(self) -> None:
        """Leave the mode."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._mode.in_forward, self._mode.in_update = True, False

    def _locate(self) -> None:
        """Hash the places of the samples of the current batch."""
        current = self._batches.current
        order = None if current is None else current[1].order
        if current is None or order is None:
            self._place = self._mode.samples = None
            return
        micro_batch = current[0]
        place = (*order, micro_batch.step, micro_batch.start)
        if place == self._place:
            return
        self._place, self._forwards = place, 0
        positions = micro_batch.positions(part_of(self._rank, self._shares))
        hashes = mixed(positions, derived_seed("position", *order)).view(np.int64)
        self._mode.samples = torch.from_numpy(hashes).to(self._device)


def _states_of_others() -> Any:
    """Return a state that changes when python's or numpy's generator is drawn from."""
    numpys = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpys["pos"], int(numpys["key"][0])


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the random numbers that operators draw.

    Attributes:
        samples: a hash for each sample of the batch; None if the batch is unknown.
        in_forward: whether a forward runs, where every draw must be replaced, and not a backward.
        in_update: whether an optimizer steps, where none is.
    """

    samples: Tensor | None = None
    in_forward: bool = True
    in_update: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args, kwargs)
        if self.in_update or not draws:
            return func(*args, **kwargs)
        replacement = _REPLACEMENTS.get(func)
        if replacement is None:
            if not self.in_forward:
                return func(*args, **kwargs)
            hint = ""
            if "attention" in func.name():
                hint = " Compute it within torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
            raise UsageError(
                f"exact_randomness does not cover {func.name()}: of the operators that draw random numbers, it covers "
                f"dropout, bernoulli, rand, randint, uniform_, randn and normal_.{hint}"
            )
        sizes = next((value for value in args if isinstance(value, (list, tuple))), None)  # of a factory function
        shape = tuple(args[0].shape if sizes is None else sizes)
        if shape and not self.in_forward and (self.samples is None or shape[0] != len(self.samples)):
            return func(*args, **kwargs)  # of a hook of a gradient, say
        return replacement(self._draw(func, shape), args, kwargs)

    def _draw(self, func: Any, shape: Sequence[int]) -> SampleDraw:
        seed = int(torch.randint(_SEEDS, ()))
        if not shape:  # for all samples at once
            return SampleDraw(torch.full((1,), seed), ())
        if self.samples is None:
            raise UsageError(
                f"exact_randomness draws the random numbers of a sample by its place in the epoch, which is unknown "
                f"here ({func.name()}): take the batches from a loader of strategy.dataloader that is not "
                "sharded=True, or set exact_randomness to false."
            )
        if shape[0] != len(self.samples):
            raise UsageError(
                f"exact_randomness can't tell which random numbers belong to which sample: {func.name()} draws a "
                f"tensor of shape {tuple(shape)}, whose first dimension is not the {len(self.samples)} samples of this "
                "batch. Let the first dimension be the sample in all of the model, or set exact_randomness to false."
            )
        return SampleDraw(self.samples + seed, shape)


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator drops nothing, such as attention in evaluation mode."""
    if func is _aten.native_dropout.default:
        return args[2] is False  # not in training
    # The only float that attention takes by position is its dropout.
    drops = any(isinstance(value, float) and value > 0 for value in (*args, kwargs.get("dropout_p")))
    return "attention" in func.name() and not drops


def _probability(args: Any, kwargs: Any) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))


def _dropout(draw: SampleDraw, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    kept = 1 - _probability(args, kwargs)
    mask = draw.below(kept)
    return args[0] * mask * (1 / kept if kept else 0.0), mask


def _in_range(draw: SampleDraw, args: Any, kwargs: Any) -> Tensor:
    low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
    high = args[2] if len(args) > 2 else kwargs.get("to", 1.0)
    return cast(Tensor, args[0].copy_(low + draw.uniform(args[0].dtype) * (high - low)))


def _normally(draw: SampleDraw, args: Any, kwargs: Any) -> Tensor:
    mean = args[1] if len(args) > 1 else kwargs.get("mean", 0.0)
    deviation = args[2] if len(args) > 2 else kwargs.get("std", 1.0)
    return cast(Tensor, args[0].copy_(mean + draw.normal(args[0].dtype) * deviation))


def _made(draw: Callable[[torch.dtype], Tensor], args: Any, kwargs: Any) -> Tensor:
    """Return drawn numbers with the dtype and device that a factory function was given."""
    like = args[0] if isinstance(args[0], Tensor) else None
    dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
    device = kwargs.get("device") or (torch.get_default_device() if like is None else like.device)
    return draw(dtype).to(device, dtype)


def _integers(draw: SampleDraw, args: Any, kwargs: Any) -> Tensor:
    low, high = (0, args[0]) if len(args) == 2 else args[:2]  # the last is the size
    drawn: Tensor = (low + draw.uniform(torch.float64) * (high - low)).floor().clamp(max=high - 1)
    return drawn.to(kwargs.get("device") or torch.get_default_device(), kwargs.get("dtype") or torch.int64)


_REPLACEMENTS: dict[Any, Callable[[SampleDraw, Any, Any], Any]] = {
    _aten.bernoulli_.float: lambda draw, args, kwargs: args[0].copy_(draw.below(_probability(args, kwargs))),
    _aten.bernoulli_.Tensor: lambda draw, args, kwargs: args[0].copy_(draw.uniform(torch.float64) < args[1]),
    _aten.bernoulli.p: lambda draw, args, kwargs: draw.below(_probability(args, kwargs)).to(args[0].dtype),
    _aten.bernoulli.default: lambda draw, args, kwargs: (draw.uniform(torch.float64) < args[0]).to(args[0].dtype),
    _aten.native_dropout.default: _dropout,
    _aten.uniform_.default: _in_range,
    _aten.normal_.default: _normally,
    _aten.rand.default: lambda draw, args, kwargs: _made(draw.uniform, args, kwargs),
    _aten.rand_like.default: lambda draw, args, kwargs: _made(draw.uniform, args, kwargs),
    _aten.randint.default: _integers,
    _aten.randint.low: _integers,
    _aten.randn.default: lambda draw, args, kwargs: _made(draw.normal, args, kwargs),
    _aten.randn_like.default: lambda draw, args, kwargs: _made(draw.normal, args, kwargs),
}
