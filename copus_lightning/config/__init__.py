"""The YAML schema of a run, and the one `load` that reads and validates it."""

from copus_lightning.config.config import Config
from copus_lightning.config.schema import (
    ConfigError,
    CopusConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfilingConfig,
    RunConfig,
    ScheduleConfig,
)
from copus_lightning.config.yaml_io import default_yaml, load, render

__all__ = [
    "Config",
    "ConfigError",
    "CopusConfig",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfilingConfig",
    "RunConfig",
    "ScheduleConfig",
    "default_yaml",
    "load",
    "render",
]
