"""A command that is forked is the command that starts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.daemon import clean_environment
from tests.support import forked
from tests.support.forked import Forked


@pytest.mark.parametrize("words", [("config", "show"), ("run", "--select=colour=green")], ids=" ".join)
def test_it_writes_and_returns_what_a_started_one_does(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read a relative path, in the directory of this process, and a variable."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text('log_level = "warning"')
    env = clean_environment({"GPUACTORS_CONFIG": "c.toml", "GPUACTORS_RESYNC_INTERVAL_S": "7"})
    started = subprocess.run(
        [sys.executable, "-m", "gpuactors", *words],
        env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    done = forked.run(words, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (started.returncode, started.stdout, started.stderr)
    assert started.stdout or started.stderr


def test_it_ends_by_the_signal_that_it_is_sent_and_another_holds_none_of_its_files(tmp_path: Path) -> None:
    flags = [
        f"--{name}={tmp_path}" for name in ("host-root", "kubelet-dir", "device-plugin-dir", "state-dir")
    ]
    short, long = (Forked(words, env=clean_environment()) for words in (["config", "show"], ["run", *flags]))
    assert short.stdout is not None
    assert short.stdout.read(), "to its end, although the other one lives"
    assert (short.wait(), long.poll()) == (0, None)
    long.kill()
    assert long.wait() == -signal.SIGKILL


def test_what_is_read_at_a_start_cannot_differ() -> None:
    with pytest.raises(AssertionError, match="PYTHONHASHSEED"):
        Forked([], env=clean_environment({"PYTHONHASHSEED": "4711"}))
