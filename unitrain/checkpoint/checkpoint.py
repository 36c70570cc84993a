"""What ``strategy.checkpoint`` returns: a run's state, saved and resumed as one."""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.checkpoint import randomness, storage
from unitrain.errors import CheckpointError, UsageError
from unitrain.training.seeding import seed_rank

if TYPE_CHECKING:
    from unitrain.strategy import Strategy


class Checkpoint:
    """The state of a run: its modules, optimizers, schedulers, loaders and plain values, by the names they were given.

    Args:
        strategy: whose ranks save and resume together.
        folder: holds one folder for each saved step.
        objects: by name; anything with ``state_dict`` and ``load_state_dict``, or a dict of plain values and tensors,
            which ``resume`` updates in place.
        keep: how many checkpoints to keep; the oldest go first.
        background: write while training goes on; at most one is being written.

    Raises:
        UsageError: an object has no state.
    """

    def __init__(
        self, strategy: Strategy, folder: Path, objects: dict[str, Any], *, keep: int, background: bool
    ) -> None:
        for name, value in objects.items():
            if not isinstance(value, dict) and not callable(getattr(value, "load_state_dict", None)):
                raise UsageError(f"checkpoint: {name}={type(value).__name__} has no state: give an object or a dict.")
        if keep < 1:
            raise UsageError(f"checkpoint keeps at least 1, not {keep}.")
        self._strategy = strategy
        self._folder = folder
        self._objects = objects
        self._keep = keep
        self._writer = ThreadPoolExecutor(1, "checkpoint") if background and strategy.is_main else None
        self._writing: Future[Path] | None = None
        self._saved_step = -1

    # ------------------------------------------------------------------------------------------------------- save

    def save(self) -> None:
        """Save the state as it is, on all ranks; within an accumulation window, at its end. Collective.

        Raises:
            CheckpointError: this one, or one that was written in the background, could not be written; on every rank.
        """
        step = self._strategy._training_step
        if step.within_window:
            step.at_window_end(self._save)
        else:
            self._save()

    def _save(self) -> None:
        self.wait()
        number = self._strategy._training_step.steps
        randoms = self._strategy.all_gather_object(randomness.capture())
        failure = None
        if self._strategy.is_main:
            parts = {name: self._state(value) for name, value in self._objects.items()}
            parts["_run"] = {"steps": number, "scaler": self._scaler_state(), "random": randoms}
            try:
                if self._writer is None:
                    self._write(number, parts)
                else:
                    snapshot = _on_host(parts)
                    self._writing = self._writer.submit(self._write, number, snapshot)
            except CheckpointError as error:
                failure = str(error)
        self._agree(failure)
        self._saved_step = number

    def wait(self) -> None:
        """Wait until what is written in the background is on the disk. Collective.

        Raises:
            CheckpointError: it could not be written; on every rank.
        """
        failure = None
        if self._writing is not None:
            error = self._writing.exception()
            self._writing, failure = None, None if error is None else str(error)
        self._agree(failure)

    def _agree(self, failure: str | None) -> None:
        failure = self._strategy.broadcast_object(failure)
        if failure is not None:
            raise CheckpointError(failure)

    def _write(self, number: int, parts: dict[str, Any]) -> Path:
        about = {
            "unitrain": version("unitrain"),
            "torch": torch.__version__,
            "world_size": self._strategy.world_size,
            "config": self._strategy.config.model_dump(mode="json"),
        }
        storage.sweep(self._folder)
        folder = storage.write(self._folder, number, parts, about)
        storage.prune(self._folder, self._keep)
        return folder

    def _state(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._strategy.unwrap(value).state_dict()
        return value if isinstance(value, dict) else value.state_dict()

    def _scaler_state(self) -> dict[str, Any] | None:
        scaler = self._strategy.precision.scaler
        return None if scaler is None else scaler.state_dict()

    # ----------------------------------------------------------------------------------------------------- resume

    def resume(self) -> bool:
        """Continue from the newest whole checkpoint, and return whether there is one. Collective.

        A damaged one is named on stderr, and the one before it is taken. The state is compared with the run's objects
        before any of it is applied. The ranks' random numbers continue on a world of the same size; on another they
        are drawn anew from seed, step and rank.

        Raises:
            CheckpointError: it is of another model or run; on every rank, with nothing changed.
        """
        result: tuple[dict[str, Any] | None, str | None] = (None, None)
        if self._strategy.is_main:
            try:
                result = (self._newest(), None)
            except CheckpointError as error:
                result = (None, str(error))
        parts, failure = self._strategy.broadcast_object(result)
        if failure is not None:
            raise CheckpointError(failure)
        if parts is None:
            return False
        self._check(parts)
        self._apply(parts)
        return True

    def _newest(self) -> dict[str, Any] | None:
        damaged = []
        for folder in storage.found(self._folder):
            try:
                manifest = storage.verify(folder)
            except storage.DamagedError as error:
                damaged.append(str(error))
                self._strategy.print(f"unitrain: damaged checkpoint passed over: {error}")
                continue
            return storage.read(folder, manifest["files"])
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self._folder} is whole ({'; '.join(damaged)}). To begin anew, give another folder."
            )
        return None

    def _check(self, parts: dict[str, Any]) -> None:
        """Raise where the state does not fit, before any of it is applied. The same on every rank."""
        names, saved = set(self._objects), set(parts) - {"_run"}
        if names != saved:
            raise CheckpointError(
                f"the checkpoint in {self._folder} holds {', '.join(sorted(saved))}; this run has "
                f"{', '.join(sorted(names))}."
            )
        for name, value in self._objects.items():
            if isinstance(value, nn.Module):
                _compare_tensors(name, self._state(value), parts[name])
            elif isinstance(value, Optimizer):
                groups = [len(g["params"]) for g in value.param_groups]
                theirs = [len(g["params"]) for g in parts[name]["param_groups"]]
                if groups != theirs:
                    raise CheckpointError(
                        f"{name} has groups of {theirs} parameters in the checkpoint, and of {groups} in this run. "
                        "Nothing was loaded."
                    )

    def _apply(self, parts: dict[str, Any]) -> None:
        strategy, run = self._strategy, parts["_run"]
        # Loaders refuse other data before the model is touched.
        for name in sorted(self._objects, key=lambda n: isinstance(self._objects[n], (nn.Module, Optimizer))):
            value = self._objects[name]
            if isinstance(value, nn.Module):
                strategy.unwrap(value).load_state_dict(parts[name])
            elif isinstance(value, dict):
                value.update(parts[name])
            else:
                value.load_state_dict(parts[name])
        strategy._training_step.steps = self._saved_step = run["steps"]
        if strategy.precision.scaler is not None and run["scaler"] is not None:
            strategy.precision.scaler.load_state_dict(run["scaler"])
        if len(run["random"]) == strategy.world_size:
            randomness.restore(run["random"][strategy.rank])
        else:
            seed_rank(strategy.config.seed, run["steps"], strategy.rank)

    def close(self) -> None:
        """Wait for the writer, and end it. Collective."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
            self._strategy.release_checkpoint()


def _compare_tensors(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key in [*ours, *(k for k in theirs if k not in ours)]:
        mine, other = (_shape(state.get(key)) for state in (ours, theirs))
        if mine != other:
            raise CheckpointError(
                f"the checkpoint is of another {name}: {key} is {other} in the checkpoint and {mine} in this run. "
                "Nothing was loaded."
            )


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "missing" if value is None else type(value).__name__


def _on_host(value: Any) -> Any:
    """Return a copy of nested state that training can no longer change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_host, value))
    return copy.deepcopy(value)
