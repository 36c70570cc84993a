"""``RunFolder``: the folder of a run's results. Only rank 0 writes to it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from unitrain import ConfigError, Section, Strategy, dump_yaml
from unitrain.checkpoint import Checkpoint
from unitrain.data.order.shares import part_of, reduced
from unitrain.features.trackers import TrackerName, Trackers
from unitrain.url import is_url


class RunFolder:
    """The folder of a run: settings and metrics, which trackers get as well. Collective: create it on all ranks.

    Args:
        strategy: the strategy of this run; its rank 0 creates the folder and writes to it.
        path: the folder; None creates a new one, ``runs/NAME-TIME-N``.
        name: the recipe's name.
        trackers: names of trackers; TensorBoard writes to the folder itself.

    Attributes:
        path: the folder, the same on all ranks.

    Raises:
        ConfigError: the folder can't be created or written to. Raised on all ranks.
    """

    def __init__(
        self, strategy: Strategy, path: Path | None, name: str, trackers: Sequence[TrackerName] = ("tensorboard",)
    ) -> None:
        self._strategy = strategy
        self._names = trackers
        self.path: Path = Path(strategy.on_main(lambda: str(_made(path, name))))
        self._trackers: Trackers | None = None

    def begin(self, settings: Section, step: int) -> None:
        """Write ``config.yaml``, for ``--config``, remove metrics of later steps than ``step``, and start the trackers.

        Collective.

        Args:
            settings: all of the recipe's settings.
            step: the last step before the run was resumed; 0 for a new run.
        """
        self._trackers = self._strategy.add(Trackers(self._names, self.path))
        self._trackers.log_settings(settings.model_dump(mode="json"))
        if not self._strategy.is_main:
            return
        (self.path / "config.yaml").write_text(dump_yaml(settings), encoding="utf-8")
        file = self.path / "metrics.jsonl"
        kept, broken = _up_to(step, file.read_bytes())
        if broken:
            print(
                f"{file}: removed {'line' if len(broken) == 1 else 'lines'} {', '.join(map(str, broken))}, which can't "
                "be read: a process ended while it wrote there.",
                file=sys.stderr,
            )
        rewritten = file.with_suffix(".tmp")
        rewritten.write_bytes(kept)
        rewritten.replace(file)  # a crash leaves the old metrics or the new ones

    def add(self, metrics: dict[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``, and log the floats to the trackers, by the optimizer step ``step``.

        The line includes the backend, launcher and world size, which may change when a run is resumed.
        """
        strategy = self._strategy
        if not strategy.is_main:
            return
        where = {
            "backend": strategy.config.backend,
            "launcher": strategy.launch.launcher,
            "world_size": strategy.world_size,
        }
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**metrics, **where}) + "\n")
        if self._trackers is not None:
            floats = {name: value for name, value in metrics.items() if isinstance(value, float)}
            self._trackers.log(floats, metrics["step"])

    def close(self) -> None:
        """Close the trackers."""
        if self._trackers is not None:
            self._trackers.close()


def _up_to(step: int, metrics: bytes) -> tuple[bytes, list[int]]:
    """Return the lines of metrics of steps up to ``step``, and the numbers of lines that hold no metrics."""
    kept, broken = [], []
    for number, line in enumerate(metrics.split(b"\n"), start=1):
        try:
            is_wanted = json.loads(line)["step"] <= step
        except (ValueError, TypeError, LookupError, RecursionError):
            if line:
                broken.append(number)
            continue
        if is_wanted:
            kept.append(line + b"\n")
    return b"".join(kept), broken


def _made(path: Path | None, name: str) -> Path:
    try:
        made = _make(path, name)
        metrics = made / "metrics.jsonl"
        metrics.touch()
        if not metrics.is_file():
            raise OSError(f"{metrics} is not a file")
    except OSError as error:
        raise ConfigError(f"the output folder can't be written: {error}. Pass another one as --output-dir.") from error
    return made


def _make(path: Path | None, name: str) -> Path:
    if path is not None:
        if is_url(path):
            raise ConfigError(
                f"{path} is a URL, but a run's metrics and events are appended to files: pass a folder as "
                "--output-dir. Only checkpoints can be kept at a URL, by strategy.checkpoint."
            )
        path.mkdir(parents=True, exist_ok=True)
        return path
    started = datetime.now().strftime("%Y%m%d-%H%M%S")
    number = 0
    while True:
        number += 1
        fresh = Path("runs", f"{name}-{started}-{number}")
        with suppress(FileExistsError):  # another run started in the same second
            fresh.mkdir(parents=True)
            return fresh


def resume_or_discard(checkpoint: Checkpoint, wanted: str, *, force: bool, discards: bool = True) -> None:
    """Continue the run in the folder of a checkpoint, or remove what is there. Collective.

    Args:
        checkpoint: the checkpoint.
        wanted: ``auto`` continues from the newest, ``never`` removes all; otherwise what to resume from.
        force: resume even if settings have changed.
        discards: whether ``never`` removes anything.
    """
    if wanted == "never" and discards:
        checkpoint.discard()
    else:
        checkpoint.resume(None if wanted == "auto" else wanted, force=force)


def summarise(strategy: Strategy, batch_size: int) -> None:
    """Print launcher, backend, devices, precision and batch size on rank 0. Collective."""
    devices = Counter(map(str, strategy.communicator.all_gather_object(strategy.device)))
    of_ranks = reduced(strategy.config.shares or (1,) * strategy.world_size)
    shares = of_ranks[:: strategy.batch_group.size]  # of groups of ranks with the same samples
    parts = sorted({part_of(place, shares).count(batch_size) for place in range(len(shares))})
    strategy.print(
        f"launcher {strategy.launch.launcher}, backend {strategy.config.backend}, processes {strategy.world_size}, "
        f"devices {', '.join(f'{count} x {device}' for device, count in devices.items())}, "
        f"precision {strategy.config.precision}\n"
        f"global batch {batch_size}, {' or '.join(map(str, parts))} per process"
    )
