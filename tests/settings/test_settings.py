"""The sources of settings: their precedence, messages for wrong values, ``--help``, and YAML files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from places import ROOT
from pydantic import Field, field_validator, model_validator

from unitrain import ConfigError, StrategyConfig
from unitrain.communication.backend import load_backend
from unitrain.config import Section
from unitrain.features.keywords import StrategySettings
from unitrain.settings import OTHER_VARIABLES, dump_yaml, parse_command_line, resolve_strategy
from unitrain.settings.schema import Setting, dotted, flag, groups_of, is_section, variable

DDPSettings: Any = load_backend("ddp").Settings
HorovodSettings: Any = load_backend("horovod").Settings
DOCS = ROOT / "docs" / "guide" / "configuration.md"


class Optimizer(Section):
    """The optimizer."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of the last step that is kept, below 100%."""


class Recipe(Section):
    """A recipe's settings, of every kind that the command line knows."""

    model: str = "small"
    """Which network."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Samples in one step."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Learning rate."""
    schedule: Literal["cosine", "step"] = "cosine"
    """How the learning rate falls."""
    milestones: list[int] = []
    """Epochs at which it falls."""
    output_dir: Path | None = None
    """Folder for results; null makes a fresh one."""
    freeze: bool = False
    """Train only the last layer."""
    optimizer: Optimizer = Optimizer()
    """What updates the weights, 100% of them."""
    strategy: StrategyConfig = StrategyConfig()
    """How the script runs."""

    @field_validator("model")
    @classmethod
    def _no_spaces(cls, model: str) -> str:
        if " " in model:
            raise ValueError("a model's name has no space in it")
        return model

    @model_validator(mode="after")
    def _large_batches_are_frozen(self) -> Recipe:
        if self.batch_size > 1000 and not self.freeze:
            raise ValueError("batch_size above 1000 needs freeze")
        return self


SETTINGS = [setting for group in groups_of(Recipe) for setting in group.settings]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("UNITRAIN_")]:
        monkeypatch.delenv(name)


def parse(*argv: str) -> Recipe:
    return parse_command_line(Recipe, argv, prog="recipe.py", description="Train 100% of it.")


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None  # no traceback of a library
    return str(caught.value)


def init(
    config: StrategyConfig | None = None, environ: dict[str, str] | None = None, **settings: Any
) -> StrategyConfig:
    return resolve_strategy(config, settings, environ or {})


def init_refusal(config: Any = None, environ: dict[str, str] | None = None, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        init(config, environ, **settings)
    return str(caught.value)


# ---- which source wins ----


@pytest.mark.parametrize("sources", [*combinations(["default", "yaml", "environment", "flag"], 2)])
@pytest.mark.parametrize(
    ("path", "values"),
    [
        (("precision",), {"default": "fp32", "yaml": "fp64", "environment": "bf16", "flag": "fp16"}),
        (("ddp", "bucket_cap_mb"), {"default": 25.0, "yaml": 1.0, "environment": 2.0, "flag": 3.0}),
    ],
)
def test_the_stronger_of_two_sources_wins(
    sources: tuple[str, str], path: tuple[str, ...], values: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    argv: list[str] = []
    if "yaml" in sources:
        nested = values["yaml"]
        for part in reversed(("strategy", *path)):
            nested = {part: nested}
        (tmp_path / "run.yaml").write_text(str(nested).replace("'", ""))
        argv += ["--config", str(tmp_path / "run.yaml")]
    if "environment" in sources:
        monkeypatch.setenv(variable(path), str(values["environment"]))
    if "flag" in sources:
        argv += [flag(("strategy", *path)), str(values["flag"])]
    strategy: Any = parse(*argv).strategy
    for part in path:
        strategy = getattr(strategy, part)
    assert strategy == values[sources[1]]


def test_a_recipes_own_settings_come_from_yaml_then_flags_never_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text("lr: 1e-3\nbatch_size: 8\noptimizer: {momentum: 0.5}\n")
    for name in ("LR", "lr", "BATCH_SIZE", "OPTIMIZER__MOMENTUM"):
        monkeypatch.setenv(name, "0.25")
    recipe = parse("--batch-size", "16", "--config", str(tmp_path / "run.yaml"))
    assert (recipe.lr, recipe.batch_size, recipe.optimizer.momentum) == (0.001, 16, 0.5)


def test_sections_merge_setting_by_setting() -> None:
    config = StrategyConfig(ddp=DDPSettings(bucket_cap_mb=1, find_unused_parameters=True))
    environ = {"UNITRAIN_DDP__POWERSGD_RANK": "3", "UNITRAIN_DDP__BUCKET_CAP_MB": "4"}
    for section in ({"bucket_cap_mb": 2}, DDPSettings(bucket_cap_mb=2)):
        ddp = init(config, environ, ddp=section).section("ddp", DDPSettings)
        assert ddp == DDPSettings(bucket_cap_mb=2, find_unused_parameters=True, powersgd_rank=3)


def test_only_what_was_set_on_a_config_outranks_the_environment() -> None:
    config = StrategyConfig(precision="fp32", ddp=DDPSettings(communication="auto"))
    environ = {
        "UNITRAIN_PRECISION": "bf16",
        "UNITRAIN_SEED": "7",
        "UNITRAIN_DDP__COMMUNICATION": "gloo",
        "UNITRAIN_DDP__BUCKET_CAP_MB": "3",
    }
    resolved = init(config, environ)
    assert (resolved.precision, resolved.seed) == ("fp32", 7)
    ddp = resolved.section("ddp", DDPSettings)
    assert (ddp.communication, ddp.bucket_cap_mb) == ("auto", 3)
    assert init(config, environ, precision="fp16", ddp={"communication": "nccl"}).precision == "fp16"


def test_fields_that_no_source_gave_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert init().model_fields_set == set()
    assert parse().model_fields_set == set()
    monkeypatch.setenv("UNITRAIN_HOROVOD__CONTROLLER", "auto")
    recipe = parse("--strategy.seed", "0")
    assert recipe.model_dump(exclude_unset=True) == {"strategy": {"seed": 0, "horovod": {"controller": "auto"}}}
    again = init(recipe.strategy, ddp=DDPSettings(powersgd_rank=2))
    assert again.model_dump(exclude_unset=True) == {
        "seed": 0,
        "horovod": {"controller": "auto"},
        "ddp": {"powersgd_rank": 2},
    }


def test_a_resolved_config_resolves_to_itself_whatever_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNITRAIN_PRECISION", "bf16")
    strategy = parse("--strategy.precision", "fp32", "--strategy.clip-norm", "null").strategy
    assert init(strategy, {"UNITRAIN_PRECISION": "bf16", "UNITRAIN_CLIP_NORM": "1"}) == strategy


# ---- the environment ----


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("UNITRAIN_PRESICION", "Did you mean 'UNITRAIN_PRECISION'?"),
        ("UNITRAIN_BUCKET_CAP_MB", "Did you mean 'UNITRAIN_DDP__BUCKET_CAP_MB'?"),
        ("UNITRAIN_DDP", "It is a section: give a setting in it, for example 'UNITRAIN_DDP__BUCKET_CAP_MB'."),
        ("UNITRAIN_precision", "is ignored."),
        ("UNITRAIN_LR", "is ignored."),
    ],
)
def test_an_unknown_variable_warns_and_is_ignored(name: str, said: str) -> None:
    with pytest.warns(
        UserWarning, match=f"^{name} is not an environment variable of UniTrain, and is ignored"
    ) as caught:
        assert init(None, {name: "bf16"}) == StrategyConfig()
    assert said in str(caught[0].message)


def test_known_variables_that_are_no_settings_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert init(None, {**dict.fromkeys(OTHER_VARIABLES, "x"), "PATH": "/"}) == StrategyConfig()


def test_the_warning_is_shown_once_for_a_recipe_that_also_calls_init() -> None:
    environ = {"UNITRAIN_PRESICION": "bf16"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # as in a script
        init(init(None, environ), environ)
    assert len(caught) == 1


# ---- the command line ----


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--freeze"], True),
        (["--freeze", "true"], True),
        (["--freeze", "false"], False),
    ],
)
def test_switches(argv: list[str], expected: bool) -> None:
    assert parse(*argv).freeze is expected


def test_nested_switches_and_lists_and_null() -> None:
    recipe = parse(
        *["--strategy.sync-batchnorm", "true", "--strategy.broadcast-buffers=false"],
        *["--strategy.fsdp.wrap", "Block,Head", "--milestones", "[30, 60]", "--output-dir", "null"],
        *["--strategy.pin-memory", "--optimizer.momentum=0"],
    )
    assert recipe.strategy.model_dump()["sync_batchnorm"] is True
    assert recipe.strategy.pin_memory is True
    assert recipe.strategy.broadcast_buffers is False
    assert recipe.strategy.model_dump()["fsdp"]["wrap"] == ("Block", "Head")
    assert (recipe.milestones, recipe.output_dir, recipe.optimizer.momentum) == ([30, 60], None, 0)


@pytest.mark.parametrize("argv", [["--local-rank=3"], ["--local_rank", "3"], ["--local_rank=0", "--lr", "0.1"]])
def test_the_local_rank_of_torch_distributed_launch_is_dropped(argv: list[str]) -> None:
    assert parse(*argv) == Recipe()


def test_a_required_setting() -> None:
    class Needy(Section):
        data: str
        """Where the data is."""
        strategy: StrategyConfig = StrategyConfig()

    assert parse_command_line(Needy, ["--data", "x"], prog="needy", description="").data == "x"
    with pytest.raises(ConfigError, match=r"^--data is required: a string\.$"):
        parse_command_line(Needy, [], prog="needy", description="")


# ---- help ----


@pytest.mark.parametrize("columns", [80, 120])
def test_help_lists_every_setting_with_meaning_allowed_values_and_default(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("UNITRAIN_PRECISION", "bf17")  # help comes first
    with pytest.raises(SystemExit) as caught:
        parse("--help", "--lr", "none")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    words = " ".join(text.split())
    for setting in SETTINGS:
        entry = words.split(f" {flag(setting.path)} ")[1]
        entry = entry[: entry.index("]", entry.index("default: "))]
        assert setting.description in entry
        assert f"default: {setting.default}" in entry.replace("default: ''", "default: ")
        assert (",".join(setting.choices) if setting.choices else setting.allowed) in entry
    assert "What updates the weights, 100% of them." in words
    for heading in ("strategy:", "strategy.ddp:", "strategy.horovod:", "optimizer:"):
        assert f"\n{heading}\n" in text


# ---- wrong flags, variables and keywords ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--strategy.precision", "bf17"], "--strategy.precision is 'bf17', but must be fp32, fp64, bf16 or fp16."),
        (["--lr", "-1"], "--lr is '-1', but must be a number > 0."),
        (["--lr", "nan"], "--lr is 'nan', but must be a number > 0."),
        (["--lr="], "--lr is '', but must be a number > 0."),
        (["--batch-size", "1.5"], "--batch-size is '1.5', but must be an integer >= 1."),
        (["--strategy.seed", "-3"], "--strategy.seed is '-3', but must be an integer >= 0, < 4294967296."),
        (["--freeze", "maybe"], "--freeze is 'maybe', but must be true or false."),
        (
            ["--strategy.device", "GPU"],
            "--strategy.device is 'GPU', but must be auto, cpu, cuda, cuda:N or another of torch's types.",
        ),
        (["--milestones", "3,x"], "--milestones is '3,x', but must be a list (0,1 or [0, 1]), each an integer."),
        (["--model", "a b"], "--model is 'a b': a model's name has no space in it."),
        (["--batch-size", "2000"], "batch_size above 1000 needs freeze."),
        (["--config"], "--config: expected one argument."),
        (["--presicion", "bf16"], "--presicion is not a flag. Did you mean '--strategy.precision'?"),
        (["--strategy.prec", "fp32"], "--strategy.prec is not a flag. Did you mean '--strategy.precision'?"),
        (["--bucket-cap-mb", "3"], "--bucket-cap-mb is not a flag. Did you mean '--strategy.ddp.bucket-cap-mb'?"),
        (
            ["--strategy.ddp", "{}"],
            "--strategy.ddp is not a flag. It is a section: give a setting in it, "
            "for example '--strategy.ddp.communication'.",
        ),
        (["train"], "unexpected argument 'train': settings are given as flags (--name value)."),
    ],
)
def test_a_wrong_command_line_is_one_message(argv: list[str], message: str) -> None:
    assert refusal(*argv) == message


def test_several_errors_are_one_message_with_a_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("schedule: steps\nstrategy:\n  ddp:\n    bucket_cap_mb: big\n")
    monkeypatch.setenv("UNITRAIN_CLIP_NORM", "0")
    file = tmp_path / "run.yaml"
    assert sorted(refusal("--lr", "x", "--config", str(file)).splitlines()) == [
        "--lr is 'x', but must be a number > 0.",
        "UNITRAIN_CLIP_NORM is '0', but must be null or a number > 0.",
        f"schedule ({file}) is 'steps', but must be cosine or step.",
        f"strategy.ddp.bucket_cap_mb ({file}) is 'big', but must be a number > 0, <= 1048576.",
    ]


def test_settings_that_exclude_each_other_are_named_where_each_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNITRAIN_COMPRESSION", "fp16")
    assert refusal("--strategy.precision", "fp64").startswith(
        "--strategy.precision is 'fp64', and UNITRAIN_COMPRESSION is 'fp16'; they are mutually exclusive: "
    )
    monkeypatch.delenv("UNITRAIN_COMPRESSION")
    assert init_refusal(StrategyConfig(precision="fp64"), compression="bf16").startswith(
        "config.precision is 'fp64', and compression is 'bf16'; they are mutually exclusive: "
    )


@pytest.mark.parametrize(
    ("name", "value", "shown", "reason"),
    [
        ("deterministic", True, "true", "needs DDP's buckets"),
        ("precision", "fp16", "'fp16'", "carries an overflow"),
        ("on_nonfinite", "skip", "'skip'", "carries a skipped gradient"),
    ],
)
def test_what_powersgd_cannot_be_combined_with(name: str, value: Any, shown: str, reason: str) -> None:
    assert init_refusal(compression="powersgd", **{name: value}).startswith(
        f"{name} is {shown}, and compression is 'powersgd'; they are mutually exclusive: powersgd {reason}"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate": True}, "accumulate is true, but must be an integer >= 1."),
        ({"timeout_s": float("inf")}, "timeout_s is inf, but must be a number > 0, <= 1000000."),
        ({"powersgd_rank": 1}, "powersgd_rank is not a setting. Did you mean 'ddp.powersgd_rank'?"),
        ({"ddp": {"bucket_cap": 1}}, "ddp.bucket_cap is not a setting. Did you mean 'ddp.bucket_cap_mb'?"),
        (
            {"horovod": {"q": 1}},
            "horovod.q is not a setting. Available settings: controller.",
        ),
        ({"ddp": {None: 1}}, "the key null is not a string, as the name of a setting is (in YAML, quote it)."),
        ({"horovod": 3}, "horovod is 3, but must be a section with controller."),
    ],
)
def test_a_wrong_keyword_is_one_message(settings: dict[str, Any], message: str) -> None:
    assert init_refusal(**settings) == message


def test_a_section_of_another_backend_is_refused() -> None:
    assert init_refusal(ddp=HorovodSettings()).startswith("ddp is HorovodSettings(")


def test_a_config_of_another_type_is_refused() -> None:
    assert init_refusal("ddp") == (
        "config must be a StrategyConfig, but is 'ddp'. Pass settings by name, as in unitrain.init(backend=\"ddp\")."
    )


def test_a_long_value_is_shortened() -> None:
    assert len(init_refusal(precision="x" * 10_000)) < 250


# ---- wrong YAML ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"strategy:\n  seed: 1\n  seed: 2\n", "not valid YAML: duplicate key 'seed' in "),
        (b"strategy:\n  presicion: bf16\n", "run.yaml) is not a setting. Did you mean 'strategy.precision'?"),
        (b"strategy: {accumulate: yes}\n", "run.yaml) is true, but must be an integer >= 1."),
        (b"strategy: {ddp: 3}\n", "run.yaml) is 3, but must be a section with communication, "),
        (b"on: 3\n", "the key true is not a string"),
        (b"", " must hold 'name: value' settings, but is None."),
        (b"- lr\n", " must hold 'name: value' settings, but is ['lr']."),
        (b"\x80\x81\xff", " is not valid YAML: 'utf-8' codec can't decode byte 0x80"),
        (b"\0\0\0", "unacceptable character #x0000"),
        (b"lr: [1\nmodel: }", 'run.yaml", line 2, column 6'),
        (b"lr: 2024-99-99\n", "not valid YAML: month must be in 1..12."),
        (b"lr: " + b"[" * 5000, "not valid YAML: maximum recursion"),
        (b"a: &a [*a]\n", "run.yaml) is not a setting."),
    ],
)
def test_a_wrong_file_is_one_message(text: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(text)
    message = refusal("--config", str(file))
    assert said in message
    assert str(file) in message or text == b"on: 3\n"
    assert len(message.splitlines()) == 1


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    assert refusal("--config", str(missing)) == f"--config {missing} can't be read: No such file or directory."
    assert refusal("--config", str(tmp_path)) == f"--config {tmp_path} can't be read: Is a directory."


def test_a_python_tag_runs_nothing(tmp_path: Path) -> None:
    tag = "python/object/apply:os.system"
    witness = tmp_path / "ran"
    file = tmp_path / "evil.yaml"
    file.write_text(f"model: !!{tag} ['touch {witness}']\n")
    message = refusal("--config", str(file))
    assert f"could not determine a constructor for the tag 'tag:yaml.org,2002:{tag}'" in message
    assert not witness.exists()


def test_a_stack_of_aliases_stays_small(tmp_path: Path) -> None:
    file = tmp_path / "laughs.yaml"
    file.write_text("a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(100)))
    assert len(refusal("--config", str(file))) < 50_000


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("optimizer: &o {momentum: 0.5}\nstrategy:\n  ddp: {<<: {bucket_cap_mb: 1}, bucket_cap_mb: 2}\n")
    recipe = parse("--config", str(file))
    assert (recipe.optimizer.momentum, recipe.strategy.section("ddp", DDPSettings).bucket_cap_mb) == (0.5, 2)


# ---- there and back ----


TEXT = st.text(st.characters(exclude_categories=["Cs"]))

# A value for each setting; no two exclude each other.
VALUES: dict[str, Any] = {
    "backend": "null", "device": "cuda:3", "precision": "bf16", "sync_batchnorm": True, "compile": True, "debug": True,
    "activation_checkpointing": ("Block", "null"), "broadcast_buffers": False, "exact_randomness": False,
    "deterministic": True, "accumulate": 3, "on_spike": "skip", "shares": (2, 1), "seed": 2**32 - 1,
    "clip_norm": 1e-300, "on_nonfinite": "skip", "shard_optimizer": True, "compression": "bf16",
    "timeout_s": 1e6, "heartbeat_timeout_s": 0.1, "pin_memory": False, "ranks_per_batch": 1,
    "ddp": {
        "communication": "gloo", "find_unused_parameters": True, "bucket_cap_mb": 1.5, "powersgd_rank": 2,
        "powersgd_start_step": 10,
    },
    "fsdp": {
        "communication": "nccl", "wrap": ("Block",), "reshard_after_forward": False, "reshard_after_backward": False,
        "find_unused_parameters": True, "shards": "host",
    },
    "horovod": {"controller": "mpi"},
    "local_sgd": {"steps": 1, "outer_lr": 0.7, "outer_momentum": 0.9},
    "memory_copies": {"every": "auto", "folder": "a: 'b'"},
    "metrics": {"port": 0, "host": "127.0.0.1"},
}  # fmt: skip


def test_the_round_trip_covers_every_setting() -> None:
    covered = {
        dotted((name, inner) if isinstance(value, dict) else (name,))
        for name, value in VALUES.items()
        for inner in (value if isinstance(value, dict) else (name,))
    }
    assert covered == {dotted(setting.path) for group in groups_of(StrategyConfig) for setting in group.settings}


@hypothesis_settings(deadline=None)  # files on a busy machine
@given(
    model=TEXT.filter(lambda text: " " not in text),
    backend=TEXT.filter(len),
    lr=st.floats(0, 1e300, exclude_min=True),
    milestones=st.lists(st.integers()),
)
def test_a_dumped_configuration_loads_equal(
    model: str, backend: str, lr: float, milestones: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    strategy = StrategyConfig.model_validate({**VALUES, "backend": backend, "clip_norm": lr})
    recipe = Recipe(model=model, lr=lr, milestones=milestones, strategy=strategy, output_dir=Path("runs/é a"))
    file = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    file.write_text(dump_yaml(recipe), encoding="utf-8")
    assert parse("--config", str(file)) == recipe


def test_a_dump_holds_every_setting() -> None:
    text = dump_yaml(Recipe())
    assert text.startswith("model: small\nbatch_size: 64\nlr: 0.1\n")
    assert all(f"{setting.path[-1]}:" in text for setting in SETTINGS)


# ---- documentation ----


def row(setting: Setting) -> str:
    allowed = ", ".join(setting.choices) or setting.allowed
    return f"| `{dotted(setting.path)}` | {allowed} | {setting.default} | {setting.description} |"


def test_a_default_within_a_section_holds_where_other_fields_are_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Clipped(Section):
        strategy: StrategyConfig = StrategyConfig(clip_norm=1.5, ddp=DDPSettings(bucket_cap_mb=3))

    def strategy(*argv: str) -> StrategyConfig:
        return parse_command_line(Clipped, argv, prog="recipe.py", description="Train.").strategy

    (tmp_path / "some.yaml").write_text("strategy: {precision: bf16}")
    flags = ("--strategy.precision=bf16", "--strategy.ddp.find-unused-parameters"), (f"--config={tmp_path}/some.yaml",)
    for found in (strategy(), *(strategy(*some) for some in flags)):
        assert (found.clip_norm, found.ddp.bucket_cap_mb) == (1.5, 3)  # type: ignore[attr-defined]
        assert "clip_norm" in found.model_fields_set
    assert strategy("--strategy.clip-norm=2").clip_norm == 2
    assert strategy("--strategy.clip-norm=null").clip_norm is None
    monkeypatch.setenv("UNITRAIN_CLIP_NORM", "3")
    assert strategy("--strategy.precision=bf16").clip_norm == 3
    with pytest.raises(SystemExit):
        strategy("--help")
    printed = " ".join(capsys.readouterr().out.split())
    assert "[null or a number > 0; default: 1.5]" in printed
    assert "default: 3.0]" in printed


def test_the_documentation_has_every_setting_as_it_is() -> None:
    table = [row(setting) for group in groups_of(StrategyConfig) for setting in group.settings]
    text = DOCS.read_text(encoding="utf-8")
    documented = [line for line in text.partition("## Every setting")[2].splitlines() if line.startswith("| `")]
    assert documented == table, "docs/guide/configuration.md should end with:\n" + "\n".join(table)


def test_the_documentation_has_every_other_variable() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert all(f"| `{name}` | {meaning} |" in text for name, meaning in OTHER_VARIABLES.items())


# ---- the types of keywords ----


def test_the_keywords_are_the_fields() -> None:
    fields = get_type_hints(StrategyConfig)
    plain = {name: fields[name] for name in StrategyConfig.model_fields if not is_section(fields[name])}
    sections = dict.fromkeys(StrategyConfig.model_fields.keys() - plain.keys(), Section | Mapping[str, Any])
    assert get_type_hints(StrategySettings) == plain | sections


# ---- plug-ins ----

PLUGIN = """
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from unitrain.config import Section, StrategyConfig, conflict
from unitrain.communication.backend import LocalBackend


class EchoSettings(Section):
    loudness: Annotated[int, Field(ge=0)] = 11
    '''How loud.'''
    hall: bool = True
    '''Whether it comes back.'''

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> "EchoSettings":
        if self.hall and self.loudness == 0:
            raise conflict("hall", "loudness", "silence does not come back")
        return self


class Echo(LocalBackend):
    name = "echo"
    Settings: ClassVar[type[Section]] = EchoSettings
"""

# What else is installed may be broken, or clash; runs that don't choose it are as they were.
BROKEN = {
    "missing": "import a_module_that_is_not_there",
    "circular": "from unitrain import Backend, StrategyConfig",
    "seed": PLUGIN.replace("class Echo(", "class B(").replace('"echo"', '"seed"'),
    "needy": PLUGIN.replace("class Echo(", "class B(")
    .replace("Field(ge=0)] = 11", "Field(ge=0)]")
    .replace('name = "echo"', 'name = "needy"'),
}

# Each line of standard input is a command line and variables; each line of the output is what came of them.
PROGRAM = """
import contextlib, io, json, os, pickle, sys, warnings
import unitrain
from unitrain.config import Section
from unitrain.settings import dump_yaml, parse_command_line

class Recipe(Section):
    strategy: unitrain.StrategyConfig = unitrain.StrategyConfig()

def run(argv):
    recipe = parse_command_line(Recipe, argv, prog="recipe", description="")
    assert pickle.loads(pickle.dumps(recipe.strategy)) == recipe.strategy
    assert "echo:" in dump_yaml(recipe)
    with unitrain.init(recipe.strategy, backend="echo", echo={"hall": False}) as strategy:
        return str(strategy.config.echo)

warnings.simplefilter("always")
for line in sys.stdin:
    argv, variables = json.loads(line)
    os.environ.update(variables)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            print(run(argv), end="")
        except unitrain.ConfigError as error:
            print(error, end="")
        except SystemExit:
            pass
    for name in variables:
        del os.environ[name]
    print(json.dumps(output.getvalue()))
"""

CASES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "flag": (
        ["--strategy.echo.loudness", "3", "--config", "FILE"],
        {"UNITRAIN_ECHO__LOUDNESS": "4"},
        "^loudness=3 hall=False$",
    ),
    "file": (["--config", "FILE"], {}, "^loudness=5 hall=False$"),
    "default": ([], {}, "^loudness=11 hall=False$"),
    "help": (
        ["--help"],
        {},
        r"strategy\.echo:\n  Settings of the backend echo\.\n\n  --strategy\.echo\.loudness VALUE\n +How loud\. "
        r"\[an integer >= 0; default: 11\]",
    ),
    "a wrong value": (
        ["--strategy.echo.loudness", "low"],
        {},
        r"^--strategy\.echo\.loudness is 'low', but must be an integer >= 0\.$",
    ),
    "a wrong name": (
        ["--loudnes", "1"],
        {},
        r"^--loudnes is not a flag\. Did you mean '--strategy\.echo\.loudness'\?$",
    ),
    "two that are mutually exclusive": (
        [],
        {"UNITRAIN_ECHO__LOUDNESS": "0"},
        r"^strategy\.echo\.hall is true \(the default\), and UNITRAIN_ECHO__LOUDNESS is '0'; they are mutually "
        r"exclusive: silence does not come back\.$",
    ),
    "a plug-in without its library": (
        ["--strategy.missing.x", "1"],
        {},
        r"^--strategy\.missing\.x is not a flag\. Backend 'missing' \(plugin_missing:B\) can't be imported: No module "
        r"named 'a_module_that_is_not_there'\.$",
    ),
    "its variable": (
        [],
        {"UNITRAIN_MISSING__X": "1"},
        r"UNITRAIN_MISSING__X is not an environment variable .* is ignored\. Backend 'missing' .*: No module named",
    ),
    "a plug-in that asks for what is being made": (
        ["--strategy.circular.x", "1"],
        {},
        "Backend 'circular' .* can't be imported: a backend's module must import StrategyConfig from unitrain.config",
    ),
    "a setting without a default": (
        ["--strategy.needy.hall"],
        {},
        "Backend 'needy' has no settings: ValidationError: .*\n *loudness",
    ),
    "a backend called as a common setting": (
        ["--strategy.seed.hall"],
        {},
        "Backend 'seed' has no settings: ValueError: StrategyConfig already has an attribute 'seed'",
    ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install others' backends in a folder of their own, and return what came of each case there."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "plugins-1.dist-info").mkdir()
    (folder / "plugins-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1\n")
    points = ["[unitrain.backends]", "echo = plugin_echo:Echo", *(f"{name} = plugin_{name}:B" for name in BROKEN)]
    (folder / "plugins-1.dist-info" / "entry_points.txt").write_text("\n".join(points))
    for name, text in {"echo": PLUGIN, **BROKEN}.items():
        (folder / f"plugin_{name}.py").write_text(text)
    (folder / "FILE").write_text("strategy: {echo: {loudness: 5}}\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="".join(json.dumps([argv, variables]) + "\n" for argv, variables, _ in CASES.values()),
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "120"},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_plug_in_has_settings_of_its_own(case: str, answers: dict[str, str]) -> None:
    assert re.search(CASES[case][2], answers[case]), answers[case]
