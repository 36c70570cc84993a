"""Trackers record on rank 0, continue the same run after a resume, and never stop training."""

from __future__ import annotations

import importlib
import re
import struct
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from ranks import run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.optim import SGD

import unitrain
from unitrain import ConfigError, Strategy, UsageError
from unitrain.features.trackers import Trackers, libraries, trackers

NAMES = ["tensorboard", "wandb", "mlflow"]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Have W&B and MLflow record in a folder, without a server."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return tmp_path / "run"


def train(folder: str, steps: int, settings: Mapping[str, Any]) -> int:
    """Resume, train for some steps more, log each, and return the last step."""
    with unitrain.init(device="cpu", timeout_s=60) as strategy:
        model, optimizer = strategy.prepare(module := nn.Linear(2, 1), SGD(module.parameters(), lr=0.1))
        checkpoint = strategy.checkpoint(Path(folder) / "checkpoints", model=model, optimizer=optimizer)
        checkpoint.resume()
        tracked = strategy.add(Trackers(NAMES, folder))
        tracked.log_settings(settings)
        for _ in range(steps):
            strategy.step(model(torch.ones(1, 2)).sum(), optimizer)
            tracked.log({"loss": 1 / strategy.global_step, "step time": torch.tensor(2)}, strategy.global_step)
            if strategy.global_step == 2:
                checkpoint.save()
        tracked.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tracker")]
        return strategy.global_step


def in_wandb(folder: Path) -> tuple[set[str], list[dict[str, str]], str]:
    """Return the ids of the runs, what was logged, and the settings, from the files of an offline run, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids, history, config = set(), [], ""
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        content, place = path.read_bytes(), 7
        while place < len(content):  # the format of LevelDB's logs; none of these is longer than a block
            length = struct.unpack_from("<H", content, place + 4)[0]
            record = Record.FromString(content[place + 7 : place + 7 + length])
            place += 7 + length
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                history.append({"".join(one.nested_key) or one.key: one.value_json for one in record.history.item})
            config += str(record.run.config) + str(record.config)
    return ids, history, config


def in_mlflow(folder: Path, metric: str) -> list[tuple[float, int]]:
    """Return the values and steps of a metric in MLflow's folder, which has one run."""
    [file] = folder.glob(f"mlruns/0/*/metrics/{metric}")
    return [(float(value), int(step)) for _, value, step in map(str.split, file.read_text().splitlines())]


def status_in_mlflow(folder: Path) -> int:
    [file] = folder.glob("mlruns/0/*/meta.yaml")
    return int(re.findall(r"^status: (\d)$", file.read_text(), re.MULTILINE)[0])


@pytest.mark.slow("imports W&B and MLflow")
def test_a_run_and_its_continuation_are_one_run_in_each_tracker(offline: Path) -> None:
    """The second goes back from step 4 to 2, and has other settings."""
    settings = {"lr": 0.1, "data": {"name": "digits"}, "many": {str(i): i for i in range(150)}}
    assert run_ranks(train, str(offline), 4, settings, nprocs=2) == [4, 4]
    assert run_ranks(train, str(offline), 1, {**settings, "lr": 0.2}, nprocs=2) == [3, 3]

    [one, two] = sorted(offline.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    assert one.stat().st_size > two.stat().st_size > 0
    shown = EventAccumulator(str(offline))
    shown.Reload()
    losses = [(event.step, event.value) for event in shown.Scalars("loss")]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert "settings/text_summary" in shown.Tags()["tensors"]

    ids, history, config = in_wandb(offline)
    assert len(ids) == 1
    logged: list[Any] = [(float(one["step"]), float(one["loss"]), float(one["step time"])) for one in history]
    assert logged == [(step, pytest.approx(1 / step), 2.0) for step in (1, 2, 3, 4, 3)]
    assert "digits" in config
    assert "0.2" in config

    steps: list[Any] = [(pytest.approx(1 / step), step) for step in (1, 2, 3, 4, 3)]
    assert in_mlflow(offline.parent, "loss") == steps
    [params] = offline.parent.glob("mlruns/0/*/params")
    assert {path.name: path.read_text() for path in params.iterdir()} == {
        "lr": "0.1", "data.name": "digits", **{f"many.{i}": str(i) for i in range(150)}
    }  # fmt: skip
    assert status_in_mlflow(offline.parent) == 3, "FINISHED"


@pytest.mark.soak
@pytest.mark.usefixtures("forked")
def test_a_run_that_fails_is_recorded_so_and_says_why(offline: Path, tmp_path: Path) -> None:
    """Its last metrics are not lost, and W&B's own hook for exceptions does not hide ours."""
    script = tmp_path / "script.py"
    script.write_text(
        "import unitrain\nfrom unitrain.features.trackers import Trackers\n"
        "strategy = unitrain.init(backend='single', device='cpu')\n"
        f"tracked = strategy.add(Trackers({NAMES}, {str(offline)!r}))\n"
        "tracked.log({'loss': 0.25}, 7)\n"
        "raise ValueError('no such label')\n"
    )
    job = run_job([sys.executable, str(script)], tmp_path)
    assert job.code == 1, job.output
    assert job.stderr.count("ValueError: no such label") == 1, job.output
    assert not job.left
    assert in_mlflow(tmp_path, "loss") == [(0.25, 7)]
    assert status_in_mlflow(tmp_path) == 4, "FAILED"
    assert in_wandb(offline)[1][0]["loss"] == "0.25"


def open_missing(folder: str) -> str:
    with unitrain.init(backend="ddp", device="cpu", timeout_s=30) as strategy:
        if strategy.is_main:
            # W&B's folder of runs in the current directory is a namespace package.
            sys.path[:] = [folder]
            importlib.invalidate_caches()
        with pytest.raises(ConfigError) as caught:
            strategy.add(Trackers(["wandb"], folder))
        return str(caught.value)


def test_a_library_that_is_missing_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    said = "the tracker wandb needs the package wandb, which is not installed: pip install wandb"
    assert run_ranks(open_missing, str(tmp_path), nprocs=2) == [said, said]


def test_what_makes_no_sense_is_refused(
    strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = Recorder()
    monkeypatch.setattr(libraries, "start", lambda *_: started)
    (tmp_path / "trackers.json").mkdir()
    with pytest.raises(ConfigError, match=r"mlflow .*Is a directory: '.*/trackers\.json'\. Correct that"):
        strategy.add(Trackers(["mlflow"], tmp_path))
    monkeypatch.undo()
    assert started.calls == [False]  # the run that began in the service has ended
    with pytest.raises(ConfigError, match="no tracker 'neptune': name tensorboard, wandb, mlflow, or pass an object"):
        strategy.add(Trackers(["neptune"], tmp_path))
    with pytest.raises(UsageError, match=r"takes a list: \['wandb'\]"):
        strategy.add(Trackers("wandb", tmp_path))
    (tmp_path / "file").touch()
    said = "the tracker tensorboard could not be started: FileExistsError"
    with pytest.raises(ConfigError, match=rf"{said}.* Correct that, or start"):
        strategy.add(Trackers(["tensorboard"], tmp_path / "file"))
    strategy._step.global_step = 5  # as after a resume: nobody may be there to correct it
    strategy.add(Trackers(["tensorboard"], tmp_path / "file")).log({"loss": 1.0}, 5)
    assert f"unitrain: {said}" in capsys.readouterr().err
    tracked = strategy.add(Trackers([Recorder()], tmp_path))
    for value in ("0.5", torch.ones(2)):
        with pytest.raises(UsageError, match=r"the metric loss is a (str|Tensor): log numbers"):
            tracked.log({"loss": value}, 1)  # type: ignore[dict-item]
    tracked.close()


class Recorder:
    """A tracker of one's own."""

    id = "a run of a service"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        self.calls.append(settings)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append((metrics, step))

    def close(self, *, completed: bool) -> None:
        self.calls.append(completed)


class Failing(Recorder):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise ConnectionError("the network is gone")


class Hanging(Recorder):
    released = threading.Event()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.released.wait()


def test_a_tracker_that_fails_or_hangs_is_reported_once_and_others_go_on(
    strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "_CLOSE_S", 0.5)
    recorder = Recorder()
    tracked = strategy.add(Trackers([Failing(), Hanging(), recorder], tmp_path))
    tracked.log_settings({"lr": 0.1})
    metrics = {"loss": 1.0}
    for step in range(3):
        tracked.log(metrics, step)
    metrics["loss"] = 7.0  # what was logged does not change
    tracked.close()
    tracked.close()
    assert recorder.calls == [{"lr": 0.1}, *(({"loss": 1.0}, step) for step in range(3)), True]
    lost = "What it could not record is lost there."
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f"unitrain: the tracker Failing failed: ConnectionError: the network is gone. {lost}",
        f"unitrain: the tracker Hanging had not recorded everything 0 s after the end. {lost}",
    ]
    Hanging.released.set()
