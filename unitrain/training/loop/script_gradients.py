"""Takes gradients that a script sets itself, in place of those of the strategy's ``backward``."""

from __future__ import annotations

import torch

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
        self._taken = 0

    def check_settings(self, call: str) -> None:
        """Raise UsageError if the settings don't allow a call, which begins the message."""
        config = self._sockets.config
        if config.accumulate > 1 or config.precision == "fp16":
            raise UsageError(
                f"{call}, but accumulate is {config.accumulate}, and precision {config.precision}: set accumulate to 1 "
                "(a script adds the gradients of several batches), and precision to bf16 or fp32 (with fp16, gradients "
                "have the scale of the loss)."
            )

    def take(self, window: Window) -> None:
        """End a window with the gradients that its parameters have. Collective if these are compared.

        The batches that loaders have yielded since the last step count as trained on.

        Raises:
            UsageError: there are none, or the settings need gradients of ``backward``.
            CommunicationError: they differ between the ranks; on all ranks.
        """
        ranks, averaging = self._sockets.communicator, self._sockets.averaging
        if all(p.grad is None for p in window.trained):
            raise UsageError(
                f"update() was called without a backward() before it, and no parameter of {window.name} has a gradient "
                "that the script has set, or another rank has dropped this optimizer."
            )
        self.check_settings("update() was called without a backward() before it, for gradients of the script")
        if averaging.in_step:
            averaging.leave_to_script()
            self._taken += 1
            if self._taken <= _COMPARED or not self._taken % _INTERVAL:
                compare_tensors(
                    ranks,
                    # NaN stands for none, which optimizers treat in another way than zeros.
                    [
                        (self._sockets.prepared.name(p), torch.full_like(p, torch.nan) if p.grad is None else p.grad)
                        for p in window.trained
                        if not ranks.sharding.is_sharded(p)
                    ],
                    "the ranks' gradients differ",
                    "Average what a script computes by strategy.average(gradients), and draw random numbers for it "
                    "from a generator with one seed on all ranks; or let strategy.backward(loss) compute it.",
                )
        self._sockets.batches.train_on_all()
        window.leave(last=True)
