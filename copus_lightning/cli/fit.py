"""`copus fit`: profiles if there is no profile, trains, and leaves a run directory."""

from __future__ import annotations

import contextlib
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from copus_lightning.callbacks import CopusCallback
from copus_lightning.cli.building import build_datasets, build_loggers
from copus_lightning.cli.checkpoints import check_model, find_resume, saved_configuration
from copus_lightning.cli.launch import (
    Place,
    is_first_rank,
    launched,
    leave,
    make_fabric,
    set_threads,
)
from copus_lightning.cli.measuring import describe_hardware, describe_model, layouts_to_measure, measure
from copus_lightning.cli.run_directory import claim, set_aside
from copus_lightning.cli.training import Training
from copus_lightning.config import Config, load, render
from copus_lightning.core.layout import Configuration
from copus_lightning.core.profile import Profile
from copus_lightning.data import TokenDataset, check_vocabulary


@dataclass(frozen=True)
class Ready:
    """What was checked: nothing is left to refuse but what only measuring can tell.

    Args:
        config: The run.
        place: Its ranks.
        datasets: For training and validation.
        profile: On the first rank, if there is one.
        resume: The checkpoint to go on from, if there is one; the first rank's word counts.
    """

    config: Config
    place: Place
    datasets: tuple[TokenDataset, TokenDataset]
    profile: Profile | None
    resume: Path | None


def prepare(arguments: Namespace) -> Ready:
    """Reads and checks configuration, data, model, and the profile if there is one.

    Raises:
        ValueError: One line that names the key and the fix.
    """
    config = load(arguments.config, arguments.overrides)
    place = Place.of(config.run)
    config.check_world_size(place.world_size)
    set_threads(place)
    datasets = build_datasets(config.data)
    fingerprint = describe_model(config, place)
    resume = find_resume(config)
    if resume is not None:
        check_model(resume, fingerprint)
    profile = None
    if is_first_rank():
        check_vocabulary(datasets[0], config.model.vocab_size)
        if config.profile_path.exists():
            profile = Profile.load(config.profile_path)
            profile.check(fingerprint, describe_hardware(place), place.world_size)
        if profile is not None or config.copus.policy != "copus":
            start(config, place, profile, resume)
        claim(Path(config.run.run_dir))
        resume = find_resume(config)  # the run that has just left the directory may have saved once more
        if resume is not None:
            check_model(resume, fingerprint)
    return Ready(config, place, datasets, profile, resume)


def run(ready: Ready) -> int:
    """Launches the ranks, profiles if need be, and trains."""
    from copus_lightning.engine.checkpoint import REFUSALS

    config, place = ready.config, ready.place
    # Only a launch: the layout that takes least memory per rank serves every case.
    layout = layouts_to_measure(config, place.world_size)[0]
    fabric = make_fabric(config, place, Configuration(layout, layout.data, 1))
    with launched(fabric):
        started = time.perf_counter()
        profile: Profile | None
        profile, resume = fabric.broadcast((ready.profile, ready.resume))  # the first rank's word
        if profile is None and config.copus.policy == "copus":
            profile = measure(config, place, fabric)
            if fabric.is_global_zero:
                profile.save(config.profile_path)
                print(profile.table())
        profiling_seconds = time.perf_counter() - started
        try:
            configuration, copus = start(config, place, profile, resume)
        except ValueError as error:  # the same on all ranks: what was measured rules the start out
            return refuse(error, fabric)
        if fabric.is_global_zero:
            if resume is None:
                set_aside(Path(config.run.run_dir))
            (Path(config.run.run_dir) / "config.yaml").write_text(render(config), encoding="utf-8")
        fabric = make_fabric(config, place, configuration, [copus], build_loggers(config))
        fabric.launch()  # joins the ranks that are there
        try:
            training = Training(config, fabric, copus, ready.datasets, resume)
        except REFUSALS as error:  # no checkpoint can be read
            fabric.strategy.teardown()
            return refuse(error, fabric)
        with fabric.strategy.naming_lost_rank():
            training.run()
        if fabric.is_global_zero:
            training.close(profiling_seconds)
        fabric.strategy.teardown()
        leave()
    if training.save_failure is not None:  # the last save's
        if fabric.is_global_zero:
            print(f"copus: {training.save_failure}", file=sys.stderr)
        return 1
    return 0


def refuse(error: Exception, fabric: Any) -> int:
    """Says why the run cannot begin, and ends the WORLD group."""
    if fabric.is_global_zero:
        print(f"copus: {' '.join(str(error.args[0]).split())}", file=sys.stderr)
    leave()
    return 2


def start(
    config: Config, place: Place, profile: Profile | None, resume: Path | None = None
) -> tuple[Configuration, CopusCallback]:
    """Where the run begins, and the callback that moves it from there.

    A run that is resumed by the same number of ranks, and chooses its layout itself, goes on where it was.

    Raises:
        ValueError: The profile does not hold what the run needs; one line with the fix.
    """
    copus = config.copus
    configuration = first_configuration(config, place, profile)
    callback = CopusCallback(
        profile=profile,
        global_batch_sizes=copus.global_batch_sizes,
        policy=copus.policy,
        objective=copus.objective,
        critical_batch_coefficient=copus.critical_batch_coefficient,
        threshold=copus.threshold,
        batch_threshold=copus.batch_threshold,
        max_batch_growth=copus.max_batch_growth,
        decide_every_tokens=copus.decide_every_tokens,
        cooldown_tokens=copus.cooldown_tokens,
        dwell_seconds=copus.dwell_seconds,
        allow_layout=copus.allow_layout,
        ramp=copus.ramp,
        noise_half_life_samples=copus.noise_half_life_samples,
        measure_cost_fraction=copus.measure_cost_fraction,
        learning_rate_rule=copus.learning_rate_rule,
        reference_batch_size=config.reference_batch_size,
        run_dir=config.run.run_dir,
        log_every_steps=config.run.log_every_steps,
    )
    if resume is not None and copus.policy == "copus" and copus.allow_layout:
        saved = saved_configuration(resume, place.world_size)
        with contextlib.suppress(ValueError):  # a profile measured since may not have it
            if saved is not None:
                callback.policy.check(saved)
                configuration = saved
    callback.policy.check(configuration)
    return configuration, callback


def first_configuration(config: Config, place: Place, profile: Profile | None) -> Configuration:
    """As the configuration says; a layout that it leaves open is the fastest of the profile."""
    first = config.first_configuration(place.world_size)
    if config.parallel.layout is not None or profile is None:
        return first
    measured = [
        configuration
        for configuration in profile.configurations([first.global_batch_size])
        if configuration.micro_batch_size == first.micro_batch_size
        # With one micro-batch per step the noise scale could not be measured.
        and configuration.layout.data * configuration.accumulation >= 2
    ]
    return max(measured, key=profile.throughput, default=first)
