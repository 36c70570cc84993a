"""The documentation site: it is built without a warning, and has the reference of all public names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import PAGES
from page_copies import renewed
from places import ROOT

import unitrain


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, which fails for a dead link, a missing anchor, and a page that the navigation leaves out."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # which the theme prints
    build = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    return folder


@pytest.mark.check
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "api").rglob("*.html"))
    members = [f"Strategy.{name}" for name in vars(unitrain.Strategy) if not name.startswith("_")]
    settings = [f"StrategyConfig.{name}" for name in ("backend", "seed", "timeout_s")]
    lacking = [name for name in (*dir(unitrain), *members, *settings) if f'id="unitrain.{name}"' not in pages]
    assert not lacking, f"docs/api/ has no ':::' line for {lacking}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_copies_is_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == renewed(text), "run: PYTHONPATH=tests/support python tests/docs/page_copies.py"
