"""The tracker ``trainjob``: what the status server of Kubeflow's controller gets, over TLS, with the mounted token."""

from __future__ import annotations

import json
import queue
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unitrain
from unitrain import ConfigError, Strategy
from unitrain.tracking import libraries

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/run-1/status"
ANSWER_S = 30


class StatusServer(ThreadingHTTPServer):
    """A server with the rules of Kubeflow's: path, token, and a body that its published model has."""

    def __init__(self, folder: Path) -> None:
        from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest as UpdateRequest

        super().__init__(("127.0.0.1", 0), Handler)
        self.model = UpdateRequest
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
            code, answer = 403, {"status": "Failure", "message": "Another job"}
        else:
            code, answer = 200, body
            assert self.path == PATH
            parsed = self.server.model.from_dict(body)
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
    """A resumed run goes on at its step. Kubernetes renews the token meanwhile."""
    now = 1000.0
    monkeypatch.setattr(libraries, "time", SimpleNamespace(monotonic=lambda: now))
    strategy._step.global_step = 50
    tracked = strategy.trackers(["trainjob"], tmp_path)
    assert server.update() == {"metrics": []}, "and no progress, which is not known"
    (tmp_path / "token").write_text("renewed\n")
    tracked.log_settings({"lr": 0.1, "total_steps": 200})
    now += 60
    tracked.log({"loss": 0.5}, 100)
    loss = {"name": "loss", "value": "0.5"}
    assert server.update() == {"progressPercentage": 50, "estimatedRemainingSeconds": 120, "metrics": [loss]}
    for step in range(101, 150):
        tracked.log({"accuracy": float("nan")}, step)
    tracked.close()
    newest = [loss, {"name": "accuracy", "value": "nan"}]
    assert server.update() == {"progressPercentage": 100, "estimatedRemainingSeconds": 0, "metrics": newest}
    assert server.updates.empty(), "Kubeflow asks for no more than one in 5 seconds"


def test_a_run_that_fails(strategy: Strategy, server: StatusServer, tmp_path: Path) -> None:
    tracked = strategy.trackers(["trainjob"], tmp_path)
    tracked.log_settings({"total_steps": 10})
    tracked.log({"loss": 1}, 4)
    tracked._close(completed=False)
    server.update()
    update = server.update()
    assert (update["progressPercentage"], update["metrics"]) == (40, [{"name": "loss", "value": "1.0"}])


def test_what_is_refused(
    strategy: Strategy, server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tracked = strategy.trackers(["trainjob"], tmp_path)
    monkeypatch.setattr(libraries, "_STATUS_INTERVAL_S", 0)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "other"))
    (tmp_path / "other").write_text("another job's")
    tracked.log({"loss": 0.5}, 1)
    tracked.close()
    refused = 'ConnectionError: HTTP Error 403: Forbidden: {"status": "Failure", "message": "Another job"}'
    said = f"unitrain: the tracker trainjob failed: {refused}. What it could not record is lost there."
    assert capsys.readouterr().err.count(said) == 1
    with pytest.raises(ConfigError, match=re.escape(f"trainjob could not be started: {refused}")):
        strategy.trackers(["trainjob"], tmp_path)
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL")
    with pytest.raises(ConfigError, match=r"could not be started: LookupError: KUBEFLOW_TRAINER_SERVER_URL is not set"):
        strategy.trackers(["trainjob"], tmp_path)
