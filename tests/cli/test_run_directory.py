"""The directory of a run belongs to one run at a time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from copus_lightning.cli import main
from copus_lightning.cli.run_directory import claim

CONFIG = """
model: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, vocab_size: 257}
data: {kind: bytes, sequence_length: 32}
run: {run_dir: run, accelerator: cpu, devices: 2, loggers: []}
copus: {policy: static}
"""

HOLDER = """
import os, time
from pathlib import Path
from copus_lightning.cli.run_directory import claim

claim(Path("run"))
worker = os.fork()
if worker:
    print(worker, flush=True)
time.sleep(60)
"""


class Holder:
    """A process that is in the directory, and a worker that it has forked."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER], cwd=folder, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        with self.process.stdout:
            self.worker = psutil.Process(int(self.process.stdout.readline()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    holder = Holder(tmp_path)
    yield holder
    holder.worker.kill()
    holder.kill()


def test_a_second_run_is_refused_before_anything_is_launched(
    holder: Holder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    Path("run/metrics.csv").write_text("of the other run")
    assert main(["fit", "--config", "tiny.yaml"]) == 2
    message = capsys.readouterr().err
    process = f"{holder.process.pid} on {socket.gethostname()}"
    expected = f"another run (process {process}) is in run: let it end, or set another run.run_dir"
    assert message.count("\n") == 1 and expected in message
    assert Path("run/metrics.csv").read_text() == "of the other run"


def test_a_run_that_was_killed_leaves_its_directory_free(holder: Holder, tmp_path: Path) -> None:
    holder.kill()
    assert holder.worker.is_running()
    claim(tmp_path / "run")
    claim(tmp_path / "run")  # the same run
    assert (tmp_path / "run/.lock").read_text().startswith(f"{os.getpid()} on ")
