"""Where several ranks write a checkpoint: a name that none has had before, seen by the ranks that share the store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from saved_run import verify

from unitrain.checkpoint.store.folder import Folder
from unitrain.checkpoint.store.objects import Objects

ABOUT: dict[str, Any] = {"world_size": 2, "strategy": {}, "config": {}}


@pytest.fixture
def folder() -> Iterator[Folder]:
    folder = Folder(Objects(f"memory://{uuid4().hex}"))
    folder.claim(0)
    yield folder
    folder.release()


def test_a_name_in_an_object_store_is_not_used_again_while_a_slow_rank_may_write_to_it(folder: Folder) -> None:
    failed = folder.begin(5)
    again = folder.begin(5)
    assert (failed.name, again.name) == ("step-0000000005", "step-0000000005.2")
    failed.write({"late": {"part": 1}})
    files = again.write({"other": {"part": 2}})
    folder.write(5, {"own": {}}, ABOUT, again, lambda: files)
    found = folder.find(5)
    assert found.folder == again.name
    assert sorted(found.manifest.files) == ["other.pt", "own.pt"]
    verify(found)
    assert folder.store.list("step-0000000005") == [], "what the slow rank has left is removed"
