"""``Checkpoint``: saves and resumes the state of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain import rng
from unitrain.checkpoint import storage
from unitrain.checkpoint.snapshot import snapshot
from unitrain.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.errors import CheckpointError, UsageError
from unitrain.job.messages import StopReason
from unitrain.process import print_stderr
from unitrain.rng import seed_rank
from unitrain.training import batch_norm
from unitrain.training.prepared import PreparedModules
from unitrain.training.step import TrainingStep

# Settings that must not change when a run is resumed. Launcher, backend, world size and timeouts may.
_TRAINING_SETTINGS = ("seed", "precision", "sync_batchnorm", "accumulate", "clip_norm", "clip_value", "compression")
_SETTINGS = "_settings"


class Checkpoint:
    """Saves and resumes modules, optimizers, schedulers, loaders and plain values. Made by ``strategy.checkpoint``.

    Args:
        communicator: the communicator of this process.
        prepared: gives the original modules of prepared ones.
        step: counts the optimizer steps.
        scaler: the GradScaler of fp16, else None.
        request_stop: reports a failure in the background to all ranks.
        released: called when the checkpoint has been closed.
        settings: the strategy's settings.
        folder: the folder of the checkpoints, each of which is a folder named by its step.
        objects: objects by name, with ``state_dict`` and ``load_state_dict``, or dicts of plain values and tensors,
            which ``resume`` updates in place.
        config: the script's settings, as plain data. Resuming with other values is refused. The strategy's settings
            are always compared.
        keep: number of checkpoints to keep; the oldest are removed first.
        background: write checkpoints while training continues, one at a time.

    Raises:
        UsageError: an object has no state.
    """

    def __init__(
        self,
        communicator: Communicator,
        prepared: PreparedModules,
        step: TrainingStep,
        scaler: torch.amp.GradScaler | None,
        request_stop: Callable[[StopReason], None],
        released: Callable[[], None],
        settings: StrategyConfig,
        folder: Path,
        objects: dict[str, Any],
        *,
        config: Mapping[str, Any],
        keep: int,
        background: bool,
    ) -> None:
        for name, value in objects.items():
            if not isinstance(value, dict) and not callable(getattr(value, "load_state_dict", None)):
                raise UsageError(
                    f"checkpoint: {name} is a {type(value).__name__}, which has no load_state_dict: pass an object "
                    "with state_dict and load_state_dict, or a dict."
                )
        if keep < 1:
            raise UsageError(f"checkpoint: keep is {keep}, but must be at least 1.")
        self._communicator = communicator
        self._prepared = prepared
        self._step = step
        self._scaler = scaler
        self._request_stop = request_stop
        self._released = released
        self._settings = settings
        self._folder = folder
        self._objects = objects
        self._config = dict(config)
        self._keep = keep
        self._writer = ThreadPoolExecutor(1, "checkpoint") if background and communicator.is_main else None
        self._writing: Future[Path] | None = None
        self._snapshot: dict[str, Any] | None = None
        self._continues_from: int | None = None
        self._began = False
        communicator.on_main(self._probe)

    def _probe(self) -> None:
        tensors = [t for module in self._modules() for t in self._prepared.unwrap(module).state_dict().values()]
        storage.probe(self._folder, sum(t.nbytes for t in tensors if isinstance(t, Tensor)))

    # ------------------------------------------------------------------------------------------------------- save

    def save(self) -> None:
        """Save a checkpoint of the current state, or at the end of the accumulation window if one is open. Collective.

        Raises:
            CheckpointError: this checkpoint, or the previous one in the background, could not be written; on every
                rank.
        """
        if self._step.within_window:
            self._step.at_window_end(self._save)
        else:
            self._save()

    def save_now(self) -> Path:
        """Save a checkpoint between two steps, wait until it is written, and return its folder. Collective."""
        self._save()
        self.wait()
        return storage.folder_of(self._folder, self._step.global_step)

    def _save(self) -> None:
        with self._communicator.pulse.within("checkpoint.save"):
            self.wait()
            batch_norm.average_statistics(self._modules(), self._communicator)
            randoms = self._communicator.all_gather_object(rng.capture())
            self._communicator.on_main(lambda: self._begin(randoms))

    def _begin(self, randoms: list[dict[str, Any]]) -> None:
        """Write the state, or start to write a snapshot of it in the background."""
        number = self._step.global_step
        if not self._began:
            self._remove_newer()
            self._began = True
        parts = {name: self._state(value) for name, value in self._objects.items()}
        parts["_run"] = {"steps": number, "scaler": self._scaler_state(), "random": randoms}
        if self._writer is None:
            self._write(number, parts)
        else:
            self._snapshot = snapshot(parts, self._snapshot)
            self._writing = self._writer.submit(self._write, number, self._snapshot)
            self._writing.add_done_callback(self._report)

    def _remove_newer(self) -> None:
        """Remove checkpoints newer than the one that was resumed: later ones of this run would not be the newest."""
        for folder in list(storage.found(self._folder)):
            if self._continues_from is None:
                raise CheckpointError(
                    f"{self._folder} contains checkpoints of another run, up to {folder.name}: call resume() to "
                    "continue that run, or discard() to remove them, or use another folder."
                )
            if storage.step_of(folder) > self._continues_from:
                storage.discard(folder)

    def discard(self) -> None:
        """Remove all checkpoints of earlier runs from the folder. Collective."""

        def remove() -> None:
            for folder in list(storage.found(self._folder)):
                storage.discard(folder)

        self._communicator.on_main(remove)

    def _report(self, writing: Future[Path]) -> None:
        """Report a failure in the background to all ranks, which raise it at their next boundary."""
        if writing.exception() is not None:
            self._request_stop(StopReason())

    def wait(self) -> None:
        """Wait until the checkpoint in the background is written. Collective.

        Raises:
            CheckpointError: it could not be written; on every rank.
        """
        with self._communicator.pulse.within("checkpoint.wait"):
            self._communicator.on_main(self._finish)

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        error = None if writing is None else writing.exception()
        if error is not None:
            raise CheckpointError(str(error)) from error

    def _write(self, number: int, parts: dict[str, Any]) -> Path:
        about = {
            "unitrain": version("unitrain"),
            "torch": torch.__version__,
            "world_size": self._communicator.world_size,
            "strategy": self._settings.model_dump(mode="json"),
            "config": self._config,
        }
        storage.sweep(self._folder)
        folder = storage.write(self._folder, number, parts, about)
        storage.prune(self._folder, self._keep)
        return folder

    def _modules(self) -> list[nn.Module]:
        return [value for value in self._objects.values() if isinstance(value, nn.Module)]

    def _state(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._prepared.unwrap(value).state_dict()
        return value if isinstance(value, dict) else value.state_dict()

    def _scaler_state(self) -> dict[str, Any] | None:
        return None if self._scaler is None else self._scaler.state_dict()

    # ----------------------------------------------------------------------------------------------------- resume

    def resume(self, path: str | Path | None = None, *, force: bool = False) -> bool:
        """Resume from the newest intact checkpoint, and return whether there is one. Collective.

        A damaged checkpoint is reported on stderr, and the previous one is used. The state is compared with the run's
        objects before any of it is applied. Random number generators are restored if the world size is the same, else
        seeded with seed, step and rank.

        Args:
            path: folder of a checkpoint to resume from (``.../step-0000000120``), instead of the newest.
            force: resume even if settings that affect training have changed.

        Raises:
            CheckpointError: no checkpoint is intact, or it does not fit this run; on every rank, with nothing changed.
        """
        self.wait()  # what this run saves in the background may be what it goes back to
        parts = self._communicator.on_main(self._newest if path is None else lambda: self._given(Path(path)))
        if parts is None:
            return False
        self._check(parts, force)
        self._apply(parts)
        return True

    def _newest(self) -> dict[str, Any] | None:
        storage.recover(self._folder)
        damaged = []
        for folder in storage.found(self._folder):
            try:
                return self._read(folder)
            except storage.DamagedError as error:
                damaged.append(str(error))
                print_stderr(f"unitrain: skipping a damaged checkpoint: {error}")
        if damaged:
            raise CheckpointError(
                f"all checkpoints in {self._folder} are damaged ({'; '.join(damaged)}). To start a new run, use "
                "another folder."
            )
        return None

    def _given(self, folder: Path) -> dict[str, Any]:
        try:
            return self._read(folder)
        except storage.DamagedError as error:
            raise CheckpointError(str(error)) from error

    def _read(self, folder: Path) -> dict[str, Any]:
        manifest = storage.verify(folder)
        return {**storage.read(folder, manifest["files"]), _SETTINGS: [manifest["strategy"], manifest["config"]]}

    def _check(self, parts: dict[str, Any], force: bool) -> None:
        """Raise CheckpointError if the state does not fit this run. The same on every rank."""
        changed = self._changed_settings(*parts.pop(_SETTINGS))
        if changed and not force:
            raise CheckpointError(
                f"the run in {self._folder} was trained with other settings: {'; '.join(changed)}. Use the same "
                "settings, or resume(force=True), or start a new run in another folder. Nothing was loaded."
            )
        names, saved = set(self._objects), set(parts) - {"_run"}
        if names != saved:
            raise CheckpointError(
                f"the checkpoint in {self._folder} contains {', '.join(sorted(saved))}, but this run has "
                f"{', '.join(sorted(names))}: pass the same objects to strategy.checkpoint. Nothing was loaded."
            )
        for name, value in self._objects.items():
            if isinstance(value, nn.Module):
                _compare_tensors(name, self._state(value), parts[name])
            elif isinstance(value, Optimizer):
                groups = [len(g["params"]) for g in value.param_groups]
                theirs = [len(g["params"]) for g in parts[name]["param_groups"]]
                if groups != theirs:
                    raise CheckpointError(
                        f"{name} has parameter groups of {theirs} parameters in the checkpoint, but of {groups} in "
                        "this run. Nothing was loaded."
                    )

    def _changed_settings(self, strategy: dict[str, Any], config: dict[str, Any]) -> list[str]:
        own = self._settings.model_dump(mode="json")
        pairs = [(f"strategy.{name}", strategy.get(name), own[name]) for name in _TRAINING_SETTINGS]
        pairs += [(name, config.get(name), self._config.get(name)) for name in dict.fromkeys([*config, *self._config])]
        return [f"{name} was {before!r} and is now {now!r}" for name, before, now in pairs if before != now]

    def _apply(self, parts: dict[str, Any]) -> None:
        ranks, run = self._communicator, parts["_run"]
        # Loaders first: they refuse other data before the model is changed.
        for name in sorted(self._objects, key=lambda n: isinstance(self._objects[n], (nn.Module, Optimizer))):
            value = self._objects[name]
            if isinstance(value, nn.Module):
                self._prepared.unwrap(value).load_state_dict(parts[name])
            elif isinstance(value, dict):
                value.update(parts[name])
            else:
                value.load_state_dict(parts[name])
        self._step.global_step = self._continues_from = run["steps"]
        self._began = False  # later checkpoints are those of a branch that this run leaves
        if self._scaler is not None and run["scaler"] is not None:
            self._scaler.load_state_dict(run["scaler"])
        if len(run["random"]) == ranks.world_size:
            rng.restore(run["random"][ranks.rank])
        else:
            seed_rank(self._settings.seed, run["steps"], ranks.rank)

    def close(self) -> None:
        """Wait for the background writer, and end it. Collective."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
            self._released()


def _compare_tensors(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key in [*ours, *(k for k in theirs if k not in ours)]:
        mine, other = (_shape(state.get(key)) for state in (ours, theirs))
        if mine != other:
            raise CheckpointError(
                f"the checkpoint belongs to another {name}: {key} is {other} in the checkpoint, but {mine} in this "
                "run. Nothing was loaded."
            )


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "missing" if value is None else type(value).__name__
