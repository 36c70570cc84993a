"""The Grafana dashboard queries metrics that there are, and a real Prometheus answers its queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import psutil
import pytest
from places import ROOT
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from unitrain.features.metrics_endpoint.endpoint import Endpoint
from unitrain.job.watch.hub import Member
from unitrain.job.watch.messages import Heartbeat
from unitrain.pulse import USER_CODE, Pulse

PAGE = ROOT / "docs" / "guide" / "monitoring.md"
DASHBOARD = json.loads((ROOT / "docs" / "guide" / "grafana.json").read_text(encoding="utf-8"))
QUERIES: list[str] = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
NAME = re.compile(r"\bunitrain_[a-z_]+")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a job with every metric."""
    endpoint = Endpoint("127.0.0.1", 0)
    endpoint.open([Member(rank, "host", 1, 0) for rank in range(3)], Pulse())
    for second in range(30):
        for rank in range(3):
            phase = USER_CODE if rank == 2 else "step"
            endpoint.observe(rank, Heartbeat(phase, second, 0.0, "", 0.0, (second, 0), 10**9), time.monotonic())
    endpoint.logged({"loss": 1.0})
    yield endpoint.port
    endpoint.at_close()


def exported(port: int) -> set[str]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(f"{text.rstrip()}\n# EOF\n")  # type: ignore[no-untyped-call]
    return {sample.name for family in families for sample in family.samples}


def test_the_dashboard_and_the_page_name_what_is_exported(port: int) -> None:
    names = exported(port)
    assert {name for query in QUERIES for name in NAME.findall(query)} == names - {"unitrain_job_info"}
    assert set(NAME.findall(PAGE.read_text(encoding="utf-8"))) == names


def ask(prometheus: int, query: str) -> list[Any]:
    address = f"http://127.0.0.1:{prometheus}/api/v1/query?query={quote(query)}"
    with urlopen(address, timeout=30) as answer:
        result: list[Any] = json.load(answer)["data"]["result"]
    return result


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus: apt-get install prometheus")
def test_prometheus_answers_every_query_of_the_dashboard(port: int, tmp_path: Path) -> None:
    static = {"job_name": "unitrain", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    settings = {"global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"}, "scrape_configs": [static]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(settings))  # which is YAML, too
    command = ["prometheus", "--web.listen-address=127.0.0.1:0", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--config.file={tmp_path / 'prometheus.yml'}"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + DEADLINE_S
        answers: dict[str, list[Any]] = {query: [] for query in QUERIES}
        while not all(answers.values()):
            assert time.monotonic() < deadline, (answers, (tmp_path / "log").read_text())
            assert process.poll() is None, (tmp_path / "log").read_text()
            for connection in psutil.Process(process.pid).net_connections():
                if connection.status != psutil.CONN_LISTEN:
                    continue
                with suppress(OSError):  # it is not ready yet
                    answers = {query: ask(connection.laddr.port, query.replace("$job", ".+")) for query in QUERIES}
    finally:
        process.kill()
        process.wait()
    slowest = next(answer for query, answer in answers.items() if "slowest" in query)
    assert [sample["value"][1] for sample in slowest] == ["2"]
