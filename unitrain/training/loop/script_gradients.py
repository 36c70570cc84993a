"""Takes gradients that a script sets itself, in place of those that the strategy's ``backward`` computes."""

from __future__ import annotations

from itertools import count

import torch

from unitrain.config import StrategyConfig
from unitrain.errors import UsageError
from unitrain.training.loop.sockets import Sockets
from unitrain.training.models.in_sync import compare_tensors
from unitrain.training.windows.window import Window

_COMPARED, _INTERVAL = 4, 100


class ScriptGradients:
    """Has ``update`` take the gradients that parameters have: the script has averaged them, if there are several ranks.

    They are compared between the ranks in the first steps, and then in one of a hundred.

    Args:
        sockets: the parts of the run.
    """

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._numbers = count()

    def take(self, window: Window) -> None:
        """End a window with the gradients that its parameters have. Collective if these are compared.

        The batches that loaders have yielded since the last step count as trained on.

        Raises:
            UsageError: the settings need those that ``backward`` computes.
            CommunicationError: they differ between the ranks; on all ranks.
        """
        ranks, averaging = self._sockets.communicator, self._sockets.averaging
        check_settings(self._sockets.config, "update() was called without a backward() before it")
        averaging.leave_to_script()
        if averaging.in_step and ((number := next(self._numbers)) < _COMPARED or number % _INTERVAL == 0):
            local = [p for p in window.trained if not ranks.sharding.is_sharded(p)]
            # NaN stands for none, which optimizers treat in another way than zeros.
            gradients = [torch.full_like(p, torch.nan) if p.grad is None else p.grad for p in local]
            named = list(zip(map(self._sockets.prepared.name, local), gradients, strict=True))
            advice = (
                "Average the gradients that the script computes, by strategy.average, and draw random numbers for them "
                "from one seed on all ranks; or have strategy.backward compute them."
            )
            compare_tensors(ranks, named, "the ranks' gradients differ", advice)
        self._sockets.batches.train_on_all()
        window.leave(last=True)


def check_settings(config: StrategyConfig, call: str) -> None:
    """Raise UsageError if the settings don't allow gradients of a script. The call begins the message."""
    if config.accumulate > 1 or config.precision == "fp16":
        raise UsageError(
            f"{call}, which accumulate above 1 and precision fp16 do not support: set accumulate to 1, and add the "
            "gradients of several batches; set precision to bf16 or fp32, as gradients have the scale of a loss."
        )
