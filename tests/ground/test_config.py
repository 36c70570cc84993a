"""The pydantic models of the settings: which values they accept, and their messages for others."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from unitrain import StrategyConfig
from unitrain.config import Section
from unitrain.settings.schema import groups_of


def test_every_setting_and_section_has_a_description() -> None:
    groups = groups_of(StrategyConfig, description="top")
    assert all(group.description for group in groups)
    assert all(setting.description for group in groups for setting in group.settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("precision", None),
        ("backend", ""),
        ("backend", False),
        ("device", "cuda:"),
        ("device", "cuda:0\n"),
        ("seed", 2**32),
        ("seed", True),
        ("clip_norm", True),
        ("clip_norm", float("nan")),
        ("clip_norm", "inf"),
        ("compression", None),
        ("timeout_s", 0),
        ("pin_memory", 2),
        ("ddp", None),
        ("ddp", {"bucket_cap_mb": float("-inf")}),
        ("ddp", {"communication": "cpu:gloo,cuda:nccl"}),
        ("fsdp", {"wrap": [1]}),
    ],
)
def test_refuses(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        StrategyConfig.model_validate({name: value})
    assert caught.value.errors()[0]["loc"][0] == name


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11", "xpu:1", "mps"])
def test_accepts_device(device: str) -> None:
    assert StrategyConfig(device=device).device == device


def test_reads_what_flags_and_variables_write_as_strings() -> None:
    config: Any = StrategyConfig.model_validate(
        {"accumulate": "4", "clip_norm": "null", "pin_memory": "false", "fsdp": {"wrap": "Block, Head"}}
    )
    assert (config.accumulate, config.clip_norm, config.pin_memory) == (4, None, False)
    assert config.fsdp.wrap == ("Block", "Head")


def test_a_string_may_hold_a_comma_and_the_word_null() -> None:
    class Strings(Section):
        one: str = ""
        either: str | list[str] = ""

    assert Strings(one="null", either="a,b") == Strings.model_construct(one="null", either="a,b")


def test_accepts_what_only_looks_like_a_conflict() -> None:
    StrategyConfig.model_validate({"clip_norm": 1})
    StrategyConfig.model_validate({"precision": "bf16", "compression": "bf16"})


def test_needs_no_torch() -> None:
    code = (
        "import sys, importlib.util as u;"
        "spec = u.spec_from_file_location('config', sys.argv[1]);"
        "module = u.module_from_spec(spec); sys.modules['config'] = module; spec.loader.exec_module(module);"
        "print([name for name in ('torch', 'yaml') if name in sys.modules])"
    )
    file = sys.modules["unitrain.config"].__file__
    assert file is not None
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
