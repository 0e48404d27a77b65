"""The whole configuration of a run: its sections, and what follows from them once the ranks are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from copus_lightning.config import checks
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
from copus_lightning.core.baselines import parse_ramp
from copus_lightning.core.layout import Configuration, Layout, enumerate_layouts
from copus_lightning.core.learning_rate import TokenSchedule


@dataclass
class Config:
    """Everything that a run is told. Valid once constructed.

    While `run.devices` is auto the number of ranks is not known: whoever learns it calls `check_world_size`.

    Raises:
        ConfigError: With one line that names the key and the fix.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    copus: CopusConfig = field(default_factory=CopusConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)

    def __post_init__(self) -> None:
        for line in checks.problems(self):
            raise ConfigError(line)
        if self.run.world_size is not None:
            self.check_world_size(self.run.world_size)

    @property
    def profile_path(self) -> Path:
        """Where the throughput profile is, or will be once measured."""
        return Path(self.copus.profile or Path(self.run.run_dir) / "profile.json")

    @property
    def profiled_micro_batch_sizes(self) -> list[int]:
        """Micro-batches that a profile has to hold, in samples."""
        return self.profiling.micro_batch_sizes or self.copus.micro_batch_sizes

    @property
    def reference_batch_size(self) -> int:
        """Global batch that the learning rate is meant for, in samples."""
        return self.copus.reference_batch_size or self.parallel.global_batch_size

    @property
    def token_schedule(self) -> TokenSchedule:
        """The learning rate's factor as a function of tokens."""
        schedule = self.schedule
        # A constant rate has no end, and what never ends is not asked for one.
        end = schedule.total_tokens or self.run.max_tokens or max(1, schedule.warmup_tokens)
        return TokenSchedule(
            kind=schedule.kind,
            total_tokens=max(end, schedule.warmup_tokens),
            warmup_tokens=schedule.warmup_tokens,
            decay_tokens=schedule.decay_tokens,
            final_factor=schedule.min_ratio,
        )

    def first_configuration(self, world_size: int) -> Configuration:
        """The configuration that a run on `world_size` ranks starts in.

        Raises:
            ConfigError: If the layout fits neither ranks nor model, or the batch does not divide.
        """
        shape = self.model.shape()
        if self.parallel.layout is None:
            layouts = enumerate_layouts(world_size, shape)
        else:
            with _naming("parallel.layout"):
                layouts = [Layout.parse(self.parallel.layout)]
                layouts[0].check(world_size, shape)
        batch, micro = self.parallel.global_batch_size, self.parallel.micro_batch_size
        layout = next((each for each in layouts if batch % (each.data * micro) == 0), layouts[0])
        with _naming("parallel.global_batch_size"):
            return Configuration(layout, batch, micro)

    def check_world_size(self, world_size: int) -> None:
        """Refuse what does not fit the number of ranks.

        Raises:
            ConfigError: With one line that names the key and the fix.
        """
        first = self.first_configuration(world_size)
        copus = self.copus
        if copus.policy in ("copus", "critical_batch") and first.accumulation * first.layout.data < 2:
            raise ConfigError(
                f"parallel.global_batch_size: {first} has one micro-batch per step, but the noise scale"
                f" needs two: use {2 * first.global_batch_size}, or a smaller parallel.micro_batch_size"
            )
        key, batches = "copus.global_batch_sizes", copus.global_batch_sizes
        layouts, micros = [first.layout], [1]
        if copus.policy == "copus":
            micros = copus.micro_batch_sizes
            if copus.allow_layout:
                layouts = enumerate_layouts(world_size, self.model.shape())
        elif copus.policy != "critical_batch":
            key, batches = "copus.ramp", [batch for _, batch in parse_ramp(copus.ramp)] if copus.ramp else []
        units = {layout.data * micro for layout in layouts for micro in micros}
        where = "any layout" if len(layouts) > 1 else str(layouts[0])
        for batch in batches:
            if not any(batch % unit == 0 for unit in units):
                below = max(batch // unit * unit for unit in units)
                above = min((batch // unit + 1) * unit for unit in units)
                nearest = f"{below} or {above}" if below else str(above)
                raise ConfigError(
                    f"{key}: {batch} does not divide into micro-batches in {where}: use {nearest}"
                )


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Puts `key` before what core has to say."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
