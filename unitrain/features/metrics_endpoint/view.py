"""A live view of a running job in the terminal, from the endpoint that the setting ``metrics.port`` opens."""

from __future__ import annotations

import json
import re
import socket
import time
from collections import defaultdict, deque
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unitrain.errors import ConfigError, UsageError
from unitrain.features.metrics_endpoint import FILE

_TIMEOUT_S, _SILENT_S = 60.0, 15.0
# Seconds between two answers, and how many times longer than an answer takes: rank 0 trains, too.
_PAUSE_S, _TIMES = 1.0, 10.0
_MOST_BYTES = 2**28
_RATE_OVER = 6  # answers, over which the steps a second are taken
_COLUMNS = ("rank", "host", "step", "s/step", "in", "waits", "memory", "heard")


def show(target: str, once: bool) -> int:
    """Show a job until it ends; or ``once``, as if stdout is no terminal."""
    if find_spec("prometheus_client") is None:
        raise ConfigError('this needs the package prometheus_client: pip install "unitrain[metrics]".')
    view, console = View(*find(target)), Console(highlight=False)
    view.ask()
    if once or not console.is_terminal:
        console.print(view.shown(None))
        return 0
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(view.shown(console.height), refresh=True)
                time.sleep(max(_PAUSE_S, _TIMES * view.took_s))
                view.ask()
    except KeyboardInterrupt:
        return 0
    except UsageError as error:
        console.print(view.shown(console.height), f"The job has ended, or can't be reached any more: {error}", sep="\n")
        return 0


def find(target: str) -> tuple[str, int, str, str]:
    """Return host and port from HOST:PORT, or from a file in a run's folder, with the job's id and the file."""
    folder = Path(target)
    if not folder.is_dir():
        match = re.fullmatch(r"\[?([^/]+?)\]?:(\d{1,5})", target)
        if match is None or int(match[2]) >= 2**16:
            raise UsageError(f"{target} is neither the folder of a run nor HOST:PORT.")
        return match[1], int(match[2]), "", ""
    file = next(iter([*folder.glob(FILE), *folder.glob(f"*/{FILE}")]), folder / FILE)
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
        host, port, id_, node = (written[key] for key in ("address", "port", "id", "host"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{file} can't be read ({error}): does a job with metrics.port run in {folder}, the folder of its trackers "
            "or checkpoints? Or pass HOST:PORT as rank 0 has printed them."
        ) from error
    if node != socket.gethostname():
        if host in ("localhost", "::1") or host.startswith("127."):
            raise UsageError(
                f"the job in {folder} runs on {node}, and can only be asked there: run unitrain top on it, or "
                f"ssh -N -L {port}:{host}:{port} {node} here, and unitrain top localhost:{port} beside it."
            )
        host = node if host in ("0.0.0.0", "::") else host
    return host, port, id_, str(file)


class View:
    """The answers of a job so far, and a view of them.

    Attributes:
        ranks: the latest values of each rank.
        values: the latest values of the job, and what the script has logged, after a space.
        took_s: how long the last answer took.
    """

    def __init__(self, host: str, port: int, id_: str = "", file: str = "") -> None:
        self._host, self._port, self._id, self._file = host, port, id_, file
        self._steps: deque[tuple[int, float]] = deque(maxlen=_RATE_OVER)
        self.ranks: dict[int, dict[str, Any]] = {}
        self.values: dict[str, float] = {}
        self.took_s: float = 0.0

    def ask(self) -> None:
        """Ask for the metrics. Later answers may take longer than the first. UsageError is raised if there are none."""
        where = f"{self._host}, port {self._port}{f', the address in {self._file}' if self._file else ''}"
        begin = time.monotonic()
        try:
            with closing(HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)) as connection:
                connection.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text"})
                id_ = self._read(connection.getresponse().read(_MOST_BYTES).decode(), begin)
        except (OSError, HTTPException, ValueError, LookupError) as error:
            if isinstance(error, TimeoutError) and self._steps:
                return  # rank 0 is busy
            hint = " It was killed or has failed: it did not remove the file." if self._file else ""
            raise UsageError(
                f"no job answers at {where} ({getattr(error, 'strerror', None) or error}).{hint}"
            ) from error
        if self._id not in ("", id_):
            raise UsageError(f"another job answers at {where}: the job that wrote this file has failed.")
        self.took_s = time.monotonic() - begin

    def _read(self, text: str, now: float) -> str:
        """Read the answer of an endpoint, and return the job's id."""
        from prometheus_client.openmetrics.parser import text_string_to_metric_families

        id_, ranks, values = "", defaultdict[int, dict[str, Any]](dict), dict[str, float]()
        for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
            name = family.name.removeprefix("unitrain_")
            for sample in family.samples:
                labels = sample.labels
                id_ = labels.get("id", id_)
                if "rank" in labels:
                    ranks[int(labels["rank"])] |= {"host": labels["host"], name: labels.get("phase", sample.value)}
                else:
                    values[f" {labels['name']}" if "name" in labels else name] = sample.value
        if not id_:
            raise ValueError
        self._steps.append((int(max((rank["step"] for rank in ranks.values()), default=0)), now))
        (first, since), (step, _) = self._steps[0], self._steps[-1]
        # Not negative: a job that was rewound or restarted counts from an earlier step.
        rates = {" steps a second": max(step - first, 0) / (now - since)} if now > since else {}
        self.ranks, self.values = ranks, values | rates
        return id_

    def shown(self, height: int | None) -> Group:
        """Render at most ``height`` lines: of many ranks, those that are silent, then those that wait least."""
        ranks, slowest = self.ranks, self.values.get("slowest_rank")
        hosts = {values["host"] for values in ranks.values()}
        text = f"step {self._steps[-1][0]}   ranks: {len(ranks)}   hosts: {len(hosts)}"
        if slowest is not None:
            text += f"   the others wait for rank {slowest:.0f}"
        lines = [f"{name[1:]:20.20} {value:10.4g}" for name, value in self.values.items() if name.startswith(" ")]
        order, room = sorted(ranks), len(ranks) if height is None else max(1, height - len(lines) - 5)
        age = {rank: values["heartbeat_age_seconds"] for rank, values in ranks.items()}
        if len(order) > room:
            order.sort(key=lambda rank: (-max(age[rank], _SILENT_S), ranks[rank]["waiting_ratio"]))
            text += f"   {room} shown"
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("host", "in") else "right", no_wrap=True)
        for rank in order[:room]:
            row = ranks[rank]
            table.add_row(
                str(rank), row["host"], f"{row['step']:.0f}", f"{row.get('seconds_per_step', 0):.3g}",
                row["phase"], f"{row['waiting_ratio']:.0%}", decimal(int(row["resident_memory_bytes"])),
                f"{age[rank]:.0f} s ago", style="red" if age[rank] > _SILENT_S else "yellow" if rank == slowest else "",
            )  # fmt: skip
        return Group(Text(text, style="bold"), "", table, "", *map(Text, lines))
