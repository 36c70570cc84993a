"""The trackers of TensorBoard, Weights & Biases and MLflow. Libraries are imported only if they are used.

Where and under which account they record is set by their own environment variables (WANDB_PROJECT, MLFLOW_TRACKING_URI
and so on). All are made of the run's folder, the last step before it was resumed (0 for a new run), and the id that the
tracker's service gave to the run, if it continues.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from unitrain.config import flattened

TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class _TensorBoard:
    """Records in the folder."""

    id = None

    def __init__(self, folder: Path, step: int, run_id: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Later steps in the folder are hidden: the run went back from them, or began anew.
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)

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
    """Records a run of Weights & Biases."""

    def __init__(self, folder: Path, step: int, run_id: str | None) -> None:
        import wandb

        hook = sys.excepthook
        self._run = wandb.init(dir=folder, name=folder.resolve().name, id=run_id, resume="allow" if run_id else None)
        sys.excepthook = hook  # W&B's would print each error a second time; close() tells W&B of the failure
        # W&B drops what is logged with an earlier value of its own step; with this metric, steps may come again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.id = self._run.id

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        self._run.config.update(dict(settings), allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def close(self, *, completed: bool) -> None:
        self._run.finish(exit_code=0 if completed else 1)


class _MLflow:
    """Records a run of MLflow."""

    def __init__(self, folder: Path, step: int, run_id: str | None) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        if run_id is None:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_ID", "0")  # 0 is the one called Default
            if named := os.environ.get("MLFLOW_EXPERIMENT_NAME"):
                experiment = mlflow.set_experiment(named).experiment_id
            run_id = str(self._client.create_run(experiment, run_name=folder.resolve().name).info.run_id)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self.id = run_id

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        # MLflow refuses another value of a parameter, such as a number of workers that has changed.
        known = self._client.get_run(self.id).data.params
        params = [Param(name, str(value)) for name, value in flattened(settings).items() if name not in known]
        self._client.log_batch(self.id, params=params)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        self._client.log_batch(self.id, metrics=[Metric(name, value, now, step) for name, value in metrics.items()])

    def close(self, *, completed: bool) -> None:
        self._client.set_terminated(self.id, status="FINISHED" if completed else "FAILED")


LIBRARIES: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}
