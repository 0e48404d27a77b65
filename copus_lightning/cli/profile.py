"""`copus profile`: measures the throughput profile and saves it."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from copus_lightning.cli.launch import Place, launched, leave, make_fabric, set_threads
from copus_lightning.cli.measuring import describe_model, layouts_to_measure, measure
from copus_lightning.config import Config, ConfigError, load
from copus_lightning.core.layout import Configuration
from copus_lightning.core.profile import Profile


@dataclass(frozen=True)
class Ready:
    """What was checked: nothing is left to refuse."""

    config: Config
    place: Place
    output: Path


def prepare(arguments: Namespace) -> Ready:
    """Reads and checks the configuration.

    Raises:
        ValueError: One line that names the key and the fix.
    """
    config = load(arguments.config, arguments.overrides)
    place = Place.of(config.run)
    config.check_world_size(place.world_size)
    set_threads(place)
    describe_model(config, place)
    output = Path(arguments.output) if arguments.output else config.profile_path
    if output.is_dir():
        raise ConfigError(f"--output: {output} is a folder: give a file")
    return Ready(config, place, output)


def run(ready: Ready) -> int:
    """Launches the ranks, measures, prints the table and saves the profile."""
    config, place = ready.config, ready.place
    layout = layouts_to_measure(config, place.world_size)[0]
    fabric = make_fabric(config, place, Configuration(layout, layout.data, 1))
    with launched(fabric):
        started = time.perf_counter()
        profile = measure(config, place, fabric)
        if fabric.is_global_zero:
            profile.save(ready.output)
            print(profile.table())
            print(_closing(profile, time.perf_counter() - started, ready.output))
        leave()
    return 0


def _closing(profile: Profile, seconds: float, output: Path) -> str:
    fits = [profile.fit(*pair) for pair in profile.pairs()]
    errors = [fit.left_out_error for fit in fits if fit.left_out_error is not None]
    lines = []
    if errors:
        lines.append(f"largest error of a fit on a point left out: {max(errors):.1%}")
    if profile.switch_seconds is not None:
        lines.append(f"median seconds of a layout switch: {profile.switch_seconds:.2f}")
    lines.append(f"measured in {seconds:.0f} s, saved to {output}")
    return "\n".join(lines)
