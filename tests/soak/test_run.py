"""What `./do soak` says without a kit, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import pytest

from tests.node import run as node_run
from tests.node.lane import Signals
from tests.node.run import Run
from tests.soak import run

DAY = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
print(flush=True)
time.sleep(600)
"""


class Played:
    """As much of a run as ends it."""

    def __init__(self) -> None:
        self.signals = Signals()
        self.signals.at_once = False


def test_without_a_kit_there_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(node_run.KIT_VARIABLE, str(tmp_path))
    assert run.main(["--hours", "0.1"]) == os.EX_UNAVAILABLE
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("./do soak: no scenario was played: ")


def test_the_first_signal_is_passed_on() -> None:
    """Its exit code is that of the day, which has ended its round and written its summary."""
    day = subprocess.Popen((sys.executable, "-c", DAY), stdout=subprocess.PIPE, text=True)
    assert day.stdout is not None
    assert day.stdout.readline()
    played = Played()
    threading.Timer(0.2, lambda: setattr(played.signals, "asked", True)).start()
    assert run._wait(cast(Run, played), day) == 7
    assert not played.signals.asked, "another one would end it at once"
    assert day.returncode != -signal.SIGINT
