"""What is a path of this machine, and what is a URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from unitrain import UsageError
from unitrain.url import is_url, parsed


@pytest.mark.parametrize("path", ["runs/a", "/runs/a", "runs/s3:/a", "", "a:b/c", "C:/runs", Path("runs")], ids=repr)
def test_a_path(path: str | Path) -> None:
    assert parsed(path) == Path(path)
    assert not is_url(path)


@pytest.mark.parametrize("path", ["file:///runs/a", "local:///runs/a", Path("file:///runs/a")], ids=repr)
def test_a_url_of_this_machine_is_a_path(path: str | Path) -> None:
    assert parsed(path) == Path("/runs/a")


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://b", "abfs+x://a/b"])
def test_a_url(url: str) -> None:
    assert parsed(url) == url
    assert is_url(url)


def test_a_url_that_a_path_has_changed_is_refused() -> None:
    assert is_url(Path("s3://bucket/run"))
    with pytest.raises(UsageError, match=r"s3:/bucket/run is a URL that has lost a slash, .*: pass it as a str\."):
        parsed(Path("s3://bucket/run"))
    with pytest.raises(UsageError, match=r"is a chain of URLs: pass the URL of the store itself"):
        parsed("simplecache::s3://bucket/run")
