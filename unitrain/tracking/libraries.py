"""The trackers of TensorBoard, Weights & Biases and MLflow, which are imported only if they are used.

Where and under which account they record is set by their own environment variables (WANDB_PROJECT, WANDB_MODE,
MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME), so that they are used as in any other script.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal, Protocol, get_args

from unitrain.errors import ConfigError
from unitrain.tracking.tracker import Run, Tracker

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
NAMES: tuple[str, ...] = get_args(TrackerName)
_MOST_PARAMS = 100  # that MLflow takes at once
_LONGEST_PARAM = 6000
_FIRST_RETRIES = 2  # MLflow's own 7 take minutes


class StartedTracker(Tracker, Protocol):
    """A tracker of one of the libraries."""

    id: str | None
    """The id of the run, for ``Run.id`` when it continues."""


def start(name: str, run: Run) -> StartedTracker:
    """Start or continue a run in the tracker called ``name``.

    Raises:
        Exception: whatever the library raises.
    """
    if name == "tensorboard":
        return _TensorBoard(run)
    return _WandB(run) if name == "wandb" else _MLflow(run)


def check_installed(name: str) -> None:
    """Check that the library of a tracker is installed.

    Raises:
        ConfigError: it isn't, or there is no such tracker.
    """
    if name not in NAMES:
        raise ConfigError(f"there is no tracker {name!r}: name {', '.join(NAMES)}, or pass an object of your own.")
    found = find_spec(name)
    if found is None or found.origin is None:  # a folder of that name, such as W&B's own, is no package
        raise ConfigError(f"the tracker {name} needs the package {name}, which is not installed: pip install {name}")


class _TensorBoard:
    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Later steps in the folder are hidden: the run went back from them, or began anew.
        self._writer = SummaryWriter(str(run.folder), purge_step=run.step + 1 if run.step else 0)
        self.id: str | None = None

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        text = json.dumps(settings, indent=4, default=str)
        self._writer.add_text("settings", "\n".join(f"    {line}" for line in text.splitlines()))  # as code
        self._writer.flush()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, completed: bool) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, run: Run) -> None:
        import wandb

        hook = sys.excepthook
        self._run = wandb.init(dir=run.folder, name=run.name, id=run.id, resume="allow" if run.id else None)
        sys.excepthook = hook  # W&B's would print each error a second time; close() tells W&B of the failure
        # W&B drops what is logged by an earlier step of its own than before; by this metric steps may come again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.id: str | None = self._run.id

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        self._run.config.update(dict(settings), allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def close(self, *, completed: bool) -> None:
        self._run.finish(exit_code=0 if completed else 1)


class _MLflow:
    def __init__(self, run: Run) -> None:
        from mlflow import MlflowClient

        with _few_retries():
            self._client = MlflowClient()
            if run.id is None:
                self._id: str = self._client.create_run(self._experiment(), run_name=run.name).info.run_id
            else:
                self._client.update_run(run.id, status="RUNNING")
                self._id = run.id
        self.id: str | None = self._id

    def _experiment(self) -> str:
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_ID, MLFLOW_EXPERIMENT_NAME

        name = MLFLOW_EXPERIMENT_NAME.get()
        if name is None:
            return str(MLFLOW_EXPERIMENT_ID.get() or "0")  # 0 is the one called Default
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        # MLflow refuses another value of a parameter, such as a number of workers that has changed.
        known = self._client.get_run(self._id).data.params
        params = [Param(name, str(value)[:_LONGEST_PARAM]) for name, value in _flat(settings) if name not in known]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in metrics.items()])

    def close(self, *, completed: bool) -> None:
        self._client.set_terminated(self._id, status="FINISHED" if completed else "FAILED")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@contextmanager
def _few_retries() -> Iterator[None]:
    """Have a server that does not answer found in seconds, unless the user has set otherwise."""
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES as RETRIES

    if RETRIES.is_set():
        yield
        return
    RETRIES.set(_FIRST_RETRIES)
    try:
        yield
    finally:
        RETRIES.unset()
