"""The folder of a run's results: settings, metrics, TensorBoard's events. Rank 0 alone writes there."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from unitrain import Strategy
from unitrain.config import Section
from unitrain.errors import ConfigError
from unitrain.settings import dump_yaml


class RunFolder:
    """A run's folder, with ``config.yaml`` in it.

    Args:
        strategy: whose rank 0 makes the folder and writes. Collective.
        settings: the recipe's, all of them; the file can be given to ``--config``.
        path: the folder, in which files of an earlier run are replaced; None makes ``runs/NAME-TIME-N``, a new one.
        name: the recipe's.

    Attributes:
        path: the folder, the same on all ranks.

    Raises:
        ConfigError: it can't be made or written to; on all ranks.
    """

    def __init__(self, strategy: Strategy, settings: Section, path: Path | None, name: str) -> None:
        made: Path | str = ""
        if strategy.is_main:
            try:
                made = _make(path, name)
                (made / "config.yaml").write_text(dump_yaml(settings), encoding="utf-8")
                (made / "metrics.jsonl").write_text("")
            except OSError as error:
                made = f"the output folder can't be written: {error}. Name another with --output-dir."
        made = strategy.broadcast_object(made)
        if isinstance(made, str):
            raise ConfigError(made)
        self.path = made
        self._writer = SummaryWriter(str(made)) if strategy.is_main else None

    def add(self, metrics: dict[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``, and give TensorBoard its floats at the optimizer step ``step``."""
        if self._writer is None:
            return
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        for name, value in metrics.items():
            if isinstance(value, float):
                self._writer.add_scalar(name, value, metrics["step"])
        self._writer.flush()

    def close(self) -> None:
        """End TensorBoard's writer."""
        if self._writer is not None:
            self._writer.close()


def _make(path: Path | None, name: str) -> Path:
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        return path
    started = datetime.now().strftime("%Y%m%d-%H%M%S")
    number = 0
    while True:
        number += 1
        fresh = Path("runs", f"{name}-{started}-{number}")
        with suppress(FileExistsError):  # another run began in this second
            fresh.mkdir(parents=True)
            return fresh
