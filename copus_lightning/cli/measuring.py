"""Measures the throughput profile of a configuration, and decides whether one that is there may be used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from copus_lightning.cli.building import build_model, build_optimizer
from copus_lightning.cli.launch import Place
from copus_lightning.cli.progress import profile_bar
from copus_lightning.config import Config
from copus_lightning.core.layout import Configuration, Layout, enumerate_layouts
from copus_lightning.core.profile import Profile
from copus_lightning.strategies.precision import SUPPORTED


def layouts_to_measure(config: Config, world_size: int) -> list[Layout]:
    """Every layout that the run may enter; the one that takes least memory per rank first."""
    if not config.copus.allow_layout:
        return [config.first_configuration(world_size).layout]
    layouts = enumerate_layouts(world_size, config.model.shape())
    return sorted(layouts, key=lambda layout: -layout.tensor * layout.pipeline)


def describe_model(config: Config, place: Place) -> dict[str, Any]:
    """The fingerprint that a profile of this configuration's model has, known before anything is launched.

    Raises:
        ValueError: The model cannot be trained here; one line with the reason.
    """
    from copus_lightning.engine.backend import environment, quiet

    with environment(DS_ACCELERATOR=place.device.type), quiet():
        from copus_lightning.engine.family import check_family
        from copus_lightning.engine.fingerprint import model_fingerprint
        from copus_lightning.engine.model import ModelDescription

        model = build_model(config.model)
        described = SimpleNamespace(
            assembler=SimpleNamespace(description=ModelDescription(model, config.run.seed)),
            settings=_settings(config, place),
        )
        check_family(model)
    return model_fingerprint(cast(Any, described), config.data.sequence_length)


def describe_hardware(place: Place) -> dict[str, Any]:
    """The fingerprint of this machine, before the ranks are connected."""
    from copus_lightning.engine.fingerprint import hardware_fingerprint

    return {**hardware_fingerprint(place.device), "backend": place.backend}


def measure(config: Config, place: Place, fabric: Any) -> Profile:
    """Measures with an engine of its own, which is closed again. Collective; all ranks get the same profile.

    Raises:
        ValueError: Nothing could run; one line with the first reason.
    """
    from copus_lightning.engine.engine import Engine
    from copus_lightning.engine.fingerprint import hardware_fingerprint, model_fingerprint
    from copus_lightning.engine.profiler import profile_engine

    layouts = layouts_to_measure(config, place.world_size)
    micro_batch_sizes = config.profiled_micro_batch_sizes
    model = build_model(config.model)
    smallest = min(micro_batch_sizes)
    engine = Engine(
        model,
        build_optimizer(model, config.optimizer),
        Configuration(layouts[0], layouts[0].data * smallest, smallest),
        _settings(config, place),
        fabric.device,
        config.run.seed,
        automatic_micro_batch=False,
    )
    with profile_bar(fabric.is_global_zero) as progress:
        measured = profile_engine(
            engine,
            config.model.vocab_size,
            config.data.sequence_length,
            layouts,
            micro_batch_sizes,
            config.profiling.accumulations,
            config.profiling.repeats,
            config.profiling.warmup_steps,
            progress,
            largest_batch=max([config.parallel.global_batch_size, *config.copus.global_batch_sizes]),
        )
    profile = Profile(
        model=model_fingerprint(engine, config.data.sequence_length),
        hardware=fabric.broadcast(hardware_fingerprint(fabric.device)),
        world_size=place.world_size,
        measurements=measured.measurements,
        infeasible=measured.infeasible,
        switch_seconds=measured.switch_seconds,
    )
    engine.close()
    if not profile.measurements:
        raise ValueError(f"no layout and micro-batch can run here: {profile.infeasible[0].reason}")
    return profile


def _settings(config: Config, place: Place) -> Any:
    from copus_lightning.engine.engine import EngineSettings

    return EngineSettings(
        zero_stage=config.parallel.zero_stage,
        dtype=SUPPORTED[config.run.precision],
        gradient_clip_norm=config.run.gradient_clip_norm,
        ranks_per_node=place.devices,
    )
