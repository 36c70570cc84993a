"""Metrics of a running job, which rank 0 serves to Prometheus and to ``unitrain top``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from unitrain.config import Section, StrategyConfig, conflict
from unitrain.errors import ConfigError

if TYPE_CHECKING:
    from unitrain.training.feature import Feature

SETTING = "metrics.port"
FILE = "metrics_endpoint.json"
"""The file with the address, in folders of the run."""


class MetricsSettings(Section):
    """Metrics of the job, which rank 0 serves for Prometheus and unitrain top."""

    port: Annotated[int, Field(ge=0, lt=2**16)] | None = None
    """Port at which rank 0 serves metrics of the job, for Prometheus and unitrain top; 0: any free one; null: none."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address at which it listens; 0.0.0.0: on all of its host's."""

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> MetricsSettings:
        if self.port is None and self.host != MetricsSettings.model_fields["host"].default:
            raise conflict("port", "host", "without a port, nothing listens")
        return self


class Settings(Section):
    """The settings that this feature adds to a run."""

    metrics: MetricsSettings = MetricsSettings()


def make(config: StrategyConfig) -> Feature:
    """Return the feature that has rank 0 serve metrics."""
    if find_spec("prometheus_client") is None:
        raise ConfigError(
            'metrics.port needs the package prometheus_client: pip install "unitrain[metrics]", or leave metrics.port '
            "unset."
        )
    from unitrain.features.metrics_endpoint.endpoint import Endpoint

    settings = Settings.of(config).metrics
    return Endpoint(settings.host, settings.port or 0)
