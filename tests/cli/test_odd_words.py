"""Words of a command line that are long, or would control the terminal: they are quoted, in every command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuactors.cli.commands import cli
from gpuactors.cli.ending import shown
from gpuactors.core.values.quote import QUOTED_TEXT_CHARS_MAX

ODD = "\x1b[2J\u202e\x9b31m\n" + "x" * 100_000
SPACED = "\x1b[2J" + "x " * 50_000

COMMANDS = [
    [ODD],
    [SPACED],
    ["--" + ODD],
    ["run", "--" + ODD],
    ["run", ODD],
    ["run", "--holders", ODD],
    ["run", "--config", ODD],
    ["inspect", "-o", ODD],
    ["inspect", "--select", ODD],
    ["explain", ODD],
    ["explain", f"default/{ODD}"],
    ["explain", f"a.b/{ODD}"],
    ["explain", "a", ODD],
    ["doctor", "--wait", ODD],
    ["simulate", "--seed", ODD],
    ["simulate", "--scenario", ODD],
    ["replay", ODD],
    ["config", ODD],
    ["config", "show", "--http-address", ODD],
    ["completion", SPACED],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(word[:12] for word in words))
def test_odd_words_are_quoted(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUACTORS_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("GPUACTORS_HOST_ROOT", str(tmp_path))
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    done = CliRunner().invoke(cli, words)
    assert done.exit_code not in (0, 70), done.output
    assert [line for line in done.output.splitlines() if not line.isprintable()] == []
    assert len(done.output) < 2 * QUOTED_TEXT_CHARS_MAX
    assert r"\x1b" in done.output


def test_a_short_usage_error_is_as_click_words_it() -> None:
    done = CliRunner().invoke(cli, ["config", "shw"])
    assert done.exit_code == 2
    assert "Usage: cli config [OPTIONS] COMMAND [ARGS]..." in done.output
    assert "Error: No such command 'shw'." in done.output


def test_the_lines_of_a_failure_stay_lines() -> None:
    assert shown("one\ntwo \x1b[2J") == "one\ntwo \\x1b[2J"


@pytest.mark.parametrize("flag", ["--config", "--pci-ids", "--kubeconfig"])
@pytest.mark.parametrize("kind", ["FIFO", "device", "directory"])
def test_a_file_that_is_none_ends_a_command_with_a_sentence(
    flag: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a FIFO's writer, and nothing reads /dev/zero to its end."""
    monkeypatch.setenv("GPUACTORS_STATE_DIR", str(tmp_path))
    path = tmp_path / "odd.toml"
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.mkdir()
    done = CliRunner().invoke(cli, ["inspect", f"--host-root={tmp_path}", flag, str(path)])
    assert done.exit_code in (69, 78), done.output
