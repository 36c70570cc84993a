"""The tracker ``trainjob``: progress and metrics in the status of a TrainJob, by way of Kubeflow's controller."""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from unitrain.errors import LaunchError

_URL, _CA_FILE, _TOKEN_FILE = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_INTERVAL_S = 5.0  # Kubeflow's documentation asks for no more updates
_ANSWER_S = 5.0


class TrainJob:
    """Sends the newest value of each metric, at once or, after an update, when the interval has passed."""

    id = None

    def __init__(self, step: int, total_steps: int | None) -> None:
        if not {_URL, _CA_FILE, _TOKEN_FILE} <= os.environ.keys():
            raise LaunchError(
                f"{_URL}, {_CA_FILE} and {_TOKEN_FILE} are not set. Kubeflow Trainer 2.2 and newer sets them in a "
                "TrainJob if the feature gate TrainJobStatus is enabled"
            )
        self._begun, self._first, self._step, self._total = time.monotonic(), step, step, total_steps
        self._metrics: dict[str, float] = {}
        self._lock = threading.Lock()
        self._later: threading.Timer | None = None
        self._send()

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """The status has no place for them."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send them, or have them sent when the interval has passed."""
        with self._lock:
            self._metrics.update(metrics)
            self._step = step
            if self._later is not None:
                return
            wait = self._sent_at + _INTERVAL_S - time.monotonic()
            if wait > 0:
                self._later = threading.Timer(wait, self._send_late)
                self._later.daemon = True
                self._later.start()
                return
        self._send()

    def close(self, *, completed: bool) -> None:
        """Send what was not sent yet, and, if the run is complete, that it is."""
        if (later := self._later) is not None:
            later.cancel()
            later.join()
        self._send(completed=completed)

    def _send_late(self) -> None:
        with suppress(OSError):  # the next update would tell
            self._send()

    def _send(self, *, completed: bool = False) -> None:
        with self._lock:
            self._later, self._sent_at = None, time.monotonic()
            status: dict[str, Any] = {
                "lastUpdatedTime": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "metrics": [{"name": name, "value": str(value)} for name, value in self._metrics.items()],
            }
            made, total = self._step, self._total
        if completed:
            status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        elif total is not None:
            status["progressPercentage"] = min(100 * made // total, 100)
            if made > self._first:
                step_s = (self._sent_at - self._begun) / (made - self._first)
                status["estimatedRemainingSeconds"] = round(max(total - made, 0) * step_s)
        # Kubernetes renews both files.
        headers = {
            "Authorization": f"Bearer {Path(os.environ[_TOKEN_FILE]).read_text().strip()}",
            "Content-Type": "application/json",
        }
        request = Request(os.environ[_URL], json.dumps({"trainerStatus": status}).encode(), headers)
        try:
            urlopen(request, timeout=_ANSWER_S, context=ssl.create_default_context(cafile=os.environ[_CA_FILE])).close()
        except HTTPError as error:
            said = error.read(1000).decode(errors="replace").strip()
            raise ConnectionError(f"{request.full_url} answered {error.code}: {said}") from None
