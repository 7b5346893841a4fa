"""What a shell is offered while a command is typed; `process/test_completion.py` asks a real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from gpuactors.cli.commands import cli
from gpuactors.cli.completion import SHELLS, VARIABLE, ColonBash, script
from gpuactors.control.about import About
from gpuactors.control.client import Running
from gpuactors.control.node_view import view_of
from gpuactors_simulation.run import list_scenarios
from tests.core.builders import Core, gpu


def offered(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The values for the word at the end of the line."""
    monkeypatch.setenv("COMP_WORDS", f"gpuactors {line}")
    asked: ShellComplete = ColonBash(cli, {}, "gpuactors", VARIABLE)
    return [
        item.value if item.type == "plain" else item.type
        for item in asked.get_completions(*asked.get_completion_args())
    ]


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("ins", ["inspect"]),
        ("inspect --wat", ["--watch"]),
        ("inspect -o ", ["table", "wide", "json", "yaml"]),
        ("inspect -o y", ["yaml"]),
        ("doctor --pr", ["--pre", "--pre-start-gate", "--prebound", "--preset"]),
        ("run --holders ", ["passive", "proc", "open"]),
        ("run --dra=o", ["on", "off"]),
        ("run --state-dir ", ["dir"]),
        ("run --pci-ids ", ["file"]),
        ("run --select ", []),
        ("config s", ["show", "schema"]),
        ("completion ", list(SHELLS)),
        ("simulate --scenario ", [name for name, _ in list_scenarios()]),
        ("replay ", ["file"]),
    ],
)
def test_what_is_offered(line: str, values: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(offered(line, monkeypatch)) == sorted(values)


def test_explain_is_offered_a_pod_and_its_virtual_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(gpu("23:00.0", 1), gpu("24:00.0", 2))
    core.ledger = {"0000:23:00.0": "virt-launcher-db-x7k2p", "0000:24:00.0": "vm-1"}
    core.pass_time(60)
    running = Running(4711, "1", About("gpu-17"), view_of(core.state, core.at))
    monkeypatch.setattr("gpuactors.control.client.read_status", lambda *_: running)
    assert sorted(offered("explain default/", monkeypatch)) == [
        "default/db",
        "default/virt-launcher-db-x7k2p",
        "default/vm-1",
    ]


def test_without_a_daemon_nothing_is_offered_to_explain_and_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offered(f"explain --state-dir={tmp_path} ", monkeypatch) == []
    assert offered("explain --dra=perhaps ", monkeypatch) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(shell: str) -> None:
    text = script(cli, shell)
    assert f"{VARIABLE}={shell}_complete" in text
    assert "%(" not in text


def test_bash_reads_its_script_without_a_word() -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script(cli, 'bash')}\ncomplete -p gpuactors"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "complete -o nosort -F _gpuactors_completion gpuactors\n"
    assert done.stderr == ""
