"""The tracker ``trainjob``: what the status server of Kubeflow's controller gets, over TLS, with the mounted token."""

from __future__ import annotations

import json
import queue
import ssl
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest as UpdateRequest

import unitrain
from unitrain import ConfigError, Strategy, UsageError
from unitrain.tracking import trainjob

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/run-1/status"
ANSWER_S = 30


class StatusServer(ThreadingHTTPServer):
    """A server with the rules of Kubeflow's: path, token, and a body that its published model has."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.updates: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        subject = ["-subj", "/CN=controller", "-addext", "subjectAltName=IP:127.0.0.1"]
        made = ["-keyout", str(folder / "key"), "-out", str(folder / "ca.crt"), "-days", "2", "-nodes"]
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *subject, *made],
            check=True,
            capture_output=True,
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "key")
        self.socket = context.wrap_socket(self.socket, server_side=True)

    def update(self) -> dict[str, Any]:
        """Wait for an update, and return it without its time."""
        update = self.updates.get(timeout=ANSWER_S)
        assert datetime.fromisoformat(update.pop("lastUpdatedTime")).tzinfo is not None
        return update


class Handler(BaseHTTPRequestHandler):
    server: StatusServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {(self.server.folder / 'token').read_text().strip()}":
            code, answer = 403, {"status": "Failure", "message": "Forbidden"}
        else:
            code, answer = 200, body
            assert self.path == PATH
            parsed = UpdateRequest.from_dict(body)
            assert parsed is not None
            assert parsed.trainer_status is not None
            known = json.loads(parsed.model_dump_json(by_alias=True, exclude_none=True))["trainerStatus"]
            assert known.keys() == body["trainerStatus"].keys(), "no key that the model lacks"
            self.server.updates.put(body["trainerStatus"])
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusServer]:
    (tmp_path / "token").write_text("first\n")
    with StatusServer(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        # As pkg/runtime/framework/plugins/trainjobstatus of Kubeflow Trainer 2.3 sets them.
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://127.0.0.1:{server.server_port}{PATH}")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "ca.crt"))
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def strategy() -> Iterator[Strategy]:
    with unitrain.init(backend="single", device="cpu") as strategy:
        yield strategy


def test_progress_and_metrics(
    strategy: Strategy, server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run goes on at its step. Updates come late, and together, if they come fast."""
    monkeypatch.setattr(trainjob, "_INTERVAL_S", 0.2)
    strategy._step.global_step = 50
    tracked = strategy.trackers(["trainjob"], tmp_path, total_steps=200)
    assert server.update() == {"progressPercentage": 25, "metrics": []}
    (tmp_path / "token").write_text("renewed\n")
    tracked.log_settings({"lr": 0.1})
    tracked.log({"loss": 0.5}, 99)
    tracked.log({"loss": 0.25, "accuracy": float("nan")}, 100)
    newest = [{"name": "loss", "value": "0.25"}, {"name": "accuracy", "value": "nan"}]
    while (update := server.update())["metrics"] != newest:
        assert update["metrics"] == [{"name": "loss", "value": "0.5"}]
    assert update["progressPercentage"] == 50
    assert isinstance(update["estimatedRemainingSeconds"], int)
    tracked.close()
    assert server.update() == {"progressPercentage": 100, "estimatedRemainingSeconds": 0, "metrics": newest}


def test_no_more_updates_than_kubeflow_asks_for(
    strategy: Strategy, server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainjob, "_INTERVAL_S", 1000)
    tracked = strategy.trackers(["trainjob"], tmp_path)
    for step in range(50):
        tracked.log({"step": step}, step)
    tracked._close(completed=False)
    assert server.update() == {"metrics": []}
    assert server.update() == {"metrics": [{"name": "step", "value": "49.0"}]}, "and no progress, which is not known"
    assert server.updates.empty()


def test_the_time_that_is_left(server: StatusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(trainjob.time, "monotonic", lambda: now)
    tracker = trainjob.TrainJob(100, 1000)
    now += 60
    tracker.log({}, 300)
    server.update()
    assert server.update() == {"progressPercentage": 30, "estimatedRemainingSeconds": 210, "metrics": []}


def test_what_is_refused(
    strategy: Strategy, server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(UsageError, match="total_steps is 0, but must be at least 1"):
        strategy.trackers(["trainjob"], tmp_path, total_steps=0)
    tracked = strategy.trackers(["trainjob"], tmp_path)
    monkeypatch.setattr(trainjob, "_INTERVAL_S", 0)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "other"))
    (tmp_path / "other").write_text("another job's")
    tracked.log({"loss": 0.5}, 1)
    tracked.close()
    said = 'answered 403: {"status": "Failure", "message": "Forbidden"}. What it could not record is lost there.'
    assert capsys.readouterr().err.count(said) == 1
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL")
    with pytest.raises(
        ConfigError, match=r"trainjob could not be started: LaunchError: KUBEFLOW_TRAINER_SERVER_URL, .*2\.2"
    ):
        strategy.trackers(["trainjob"], tmp_path)
