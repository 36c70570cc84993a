"""A pytest plugin: how the workers of ``pytest -n`` share the tests.

The long ones come first, so that all workers end together; those of an ``xdist_group``, or with the same fixture of a
module, stay on one worker, because they share what takes long to make; and those marked ``alone`` run when the other
workers are done, because they bound a time from above that another worker's load could exceed. A bound that a busy
machine keeps by a factor of ten needs no mark.

pytest-xdist's own ``--dist loadgroup`` is not enough. It knows no test that runs alone, and it passes a group on as a
suffix of the test's id, which it writes where pytest 9.2 does not look. Here each worker writes its groups into a file.
Without ``-n``, tests run in one process, in the order of the files.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

_ALONE = "alone"
_FOLDER = pytest.StashKey[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Tell a worker where to write the groups of its tests; xdist has it send their ids only."""
    config = node.config
    if _FOLDER not in config.stash:
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        config.stash[_FOLDER] = folder.name
    node.workerinput["groups"] = str(Path(config.stash[_FOLDER], node.gateway.id))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order a worker's tests, and write down their groups."""
    workerinput = getattr(config, "workerinput", None)
    if workerinput is None:
        return
    items.sort(key=lambda item: item.get_closest_marker("launcher") is None)  # seconds each, the others much less
    groups = {item.nodeid: group for item in items if (group := _group_of(item)) is not None}
    Path(workerinput["groups"]).write_text(json.dumps(groups))


def _group_of(item: pytest.Item) -> str | None:
    if item.get_closest_marker("alone") is not None:
        return _ALONE
    mark = item.get_closest_marker("xdist_group")
    if mark is not None:
        return str(mark.args[0])
    if not isinstance(item, pytest.Function):
        return None
    fixtures = item._fixtureinfo.name2fixturedefs  # pytest has no public name for their scopes
    of_module = sorted(name for name, [*_, last] in fixtures.items() if last.scope == "module")
    return f"{item.path}:{of_module[0]}" if of_module else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Schedule by these groups, unless ``--dist`` is given."""
    if config.option.dist != "load":
        return None
    config.option.loadscopereorder = False  # keep the order of the collection
    return _Scheduling(config, log)


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Assigns groups, and single tests without one. Tests that run alone go to the last worker, after all others."""

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        self._groups: dict[str, str] = json.loads(Path(node.workerinput["groups"]).read_text())
        super().add_node_collection(node, collection)

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.get(nodeid, nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if _ALONE in self.workqueue:
            self.workqueue.move_to_end(_ALONE)
            if len(self.workqueue) == 1:
                *others, node = self.nodes
                for other in others:
                    if not other.shutting_down:
                        other.shutdown()  # after the tests that it was assigned
                if any(self._pending_of(self.assigned_work[other]) for other in others):
                    return
        super()._assign_work_unit(node)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        self._reschedule(self.nodes[-1])  # it may have waited for this one
