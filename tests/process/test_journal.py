"""The flight recorder of a real daemon: what it wrote comes out of `gpuactors replay` again, to the same digests."""

from __future__ import annotations

import json
import os
import resource as limits
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.process.daemon import DaemonProcess, clean_environment, eventually, gpuactors
from tests.process.node import A100, H100, HEALTHY, UNHEALTHY, Node, address, open_node

FIRST, SECOND = address(0x23), address(0x24)
EX_DATAERR, EX_CANTCREAT = 65, 73


@pytest.fixture
def node() -> Iterator[Node]:
    """A node with two GPUs."""
    with open_node() as found:
        for slot in (0x23, 0x24):
            found.plug(slot, "2330", driver="vfio-pci")
        yield found


def journal(node: Node) -> Path:
    return node.directory / "s" / "journal"


def recorded(node: Node) -> list[dict[str, object]]:
    """The lines that are there by now; the last one of a file may be torn."""
    lines: list[dict[str, object]] = []
    for path in sorted(journal(node).glob("*.jsonl")):
        whole = path.read_text().splitlines(keepends=True)
        lines += [json.loads(line) for line in whole if line.endswith("\n")]
    return lines


def happened(node: Node, event: str) -> None:
    """Waits until an event was written."""
    eventually(
        lambda: journal(node).exists() and any(line.get("event") == event for line in recorded(node)),
        f"{event} in the journal",
    )


def serves(node: Node) -> None:
    node.wait_device_lists({H100: {FIRST: HEALTHY, SECOND: HEALTHY}})


def a_life(node: Node) -> None:
    """Something of everything: a new model, a pod, a refusal, an unbind, another kubelet."""
    serves(node)
    node.tell(node.plug(0x31, "20b0", driver="vfio-pci"))
    node.wait_device_lists({H100: {FIRST: HEALTHY, SECOND: HEALTHY}, A100: {address(0x31): HEALTHY}})
    # Of a named pod, or the grant ends with a read of the ledger that comes before the end of this life, or not.
    node.kubelet.allocate(H100, [FIRST], pod="vm-1")
    node.kubelet.prestart(H100, [FIRST])
    node.tell(node.tree.unbind(FIRST))
    node.wait_device_lists({H100: {FIRST: UNHEALTHY, SECOND: HEALTHY}, A100: {address(0x31): HEALTHY}})
    node.kubelet.stop()
    node.kubelet.start()
    node.wait_device_lists({H100: {FIRST: UNHEALTHY, SECOND: HEALTHY}, A100: {address(0x31): HEALTHY}})


def test_a_life_replays_to_the_same(node: Node) -> None:
    with node.daemon():
        a_life(node)
    lines = recorded(node)
    events = {line.get("event") for line in lines}
    assert {"HostScanned", "AllocateAsked", "PreStartAsked", "KubeletAppeared", "ShutdownRequested"} <= events

    for where in (node.directory / "s", journal(node), next(journal(node).iterdir())):
        done = gpuactors("replay", str(where))
        assert done.returncode == 0, done.stdout + done.stderr
        steps = sum(1 if "event" in line else len(str(line.get("again", ""))) for line in lines)
        assert done.stdout.splitlines()[-1].startswith(f"{steps} steps in ")
        assert done.stdout.splitlines()[-1].endswith(": no differences")
    assert "Allocate" in done.stdout
    assert not done.stderr

    as_json = gpuactors("replay", str(journal(node)), "-o", "json")
    lines_shown = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert sum("step" in line for line in lines_shown) == steps
    assert lines_shown[-1]["resources"][H100] == {"capacity": 2, "allocatable": 1, "allocated": 1, "free": 0}

    page = node.directory / "page.html"
    assert gpuactors("replay", str(journal(node)), "--html", str(page)).returncode == 0
    assert FIRST in page.read_text()


def test_the_nodes_name_is_in_each_line_of_the_log_and_in_the_journal(node: Node) -> None:
    with node.daemon("--node-name=gpu-17") as daemon:
        daemon.wait_event("daemon.serving")
    assert {line.get("node") for line in daemon.log} == {"gpu-17"}
    text = gpuactors("replay", str(journal(node)))
    assert f"process {daemon.pid} of gpuactors {version('gpuactors')} on node gpu-17" in text.stdout
    page = node.directory / "page.html"
    assert gpuactors("replay", str(journal(node)), "--html", str(page)).returncode == 0
    assert "on node gpu-17 from" in page.read_text()


def test_a_node_without_a_given_name_has_the_hosts(node: Node) -> None:
    with node.daemon() as daemon:
        daemon.wait_event("daemon.started", node=os.uname().nodename)


def test_a_daemon_that_is_killed_leaves_what_can_be_replayed(node: Node) -> None:
    with node.daemon() as daemon:
        serves(node)
        happened(node, "RegisterAnswered")
        daemon.signal(signal.SIGKILL)
        daemon.wait_exit()
    (path,) = journal(node).iterdir()
    assert gpuactors("replay", str(path)).returncode == 0
    with path.open("r+b") as file:  # in the middle of a write
        file.truncate(path.stat().st_size - 9)
    torn = gpuactors("replay", str(path), "--diff")
    assert torn.returncode == 0
    assert "the last line was not written to its end" in torn.stdout

    with node.daemon():  # the next one writes a file of its own
        serves(node)
    assert len(list(journal(node).iterdir())) == 2
    both = gpuactors("replay", str(journal(node)))
    assert both.returncode == 0
    assert both.stdout.count(" of gpuactors ") == 2


def test_a_full_disk_is_said_once_and_the_daemon_goes_on(node: Node) -> None:
    with node.daemon() as daemon:
        serves(node)
        happened(node, "RegisterAnswered")
        size = max(path.stat().st_size for path in journal(node).iterdir())
        # As ENOSPC does, in the middle of a line: a file may not get larger (EFBIG; Python ignores SIGXFSZ).
        limits.prlimit(daemon.pid, limits.RLIMIT_FSIZE, (size + 100, limits.RLIM_INFINITY))
        node.tell(node.plug(0x31, "20b0", driver="vfio-pci"))
        line = daemon.wait_event("journal.failed", has=[str(journal(node)), "--state-dir"])
        assert line["level"] == "warning"
        node.wait_device_lists({H100: {FIRST: HEALTHY, SECOND: HEALTHY}, A100: {address(0x31): HEALTHY}})
        limits.prlimit(daemon.pid, limits.RLIMIT_FSIZE, (limits.RLIM_INFINITY, limits.RLIM_INFINITY))
    # The end of the daemon is the next attempt: a new file, with the state and the number of steps that are missing.
    found = gpuactors("replay", str(journal(node)))
    assert found.returncode == 0, found.stdout
    assert "missing" in found.stdout
    assert sum(line["event"] == "journal.failed" for line in daemon.log) == 1
    states = [line for line in recorded(node) if "missed" in line]
    assert len(states) == 2
    assert states[1]["missed"] != 0


def test_a_state_directory_that_cannot_be_written(node: Node) -> None:
    (node.directory / "s").touch()
    with node.daemon() as daemon:
        serves(node)
        daemon.wait_event("journal.failed", has=["s/journal", "the daemon continues without it"])


def test_a_journal_can_be_switched_off(node: Node) -> None:
    with node.daemon("--journal=off"):
        serves(node)
    assert not journal(node).exists()


def test_two_daemons_that_hand_over_are_replayed_together(node: Node) -> None:
    with node.daemon() as old:
        serves(node)
        with node.daemon("--uevents=off") as new:
            new.wait_event("daemon.serving", predecessor=f"process {old.pid} has handed over")
            serves(node)
            old.assert_alive()
    found = gpuactors("replay", str(journal(node)))
    assert found.returncode == 0, found.stdout
    assert found.stdout.count(" of gpuactors ") == 2
    assert "a successor asks for the hand-over" in found.stdout


def test_what_cannot_be_replayed_is_named(node: Node, tmp_path: Path) -> None:
    for words, code, named in (
        ([str(tmp_path)], EX_DATAERR, f"there is no journal in {tmp_path}"),
        ([__file__], EX_DATAERR, "cannot be replayed: it is no line of a journal"),
        ([str(tmp_path / "gone")], 2, "does not exist"),
    ):
        done = gpuactors("replay", *words)
        assert done.returncode == code
        assert named in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
    with running(node):
        serves(node)
    done = gpuactors("replay", str(journal(node)), "--until=soon")
    assert (done.returncode, "neither seconds since the beginning" in done.stderr) == (2, True)
    done = gpuactors("replay", str(journal(node)), "--html", str(tmp_path / "no" / "page.html"))
    assert (done.returncode, "cannot write" in done.stderr) == (EX_CANTCREAT, True)


def test_a_reader_that_has_had_enough_is_no_error(node: Node) -> None:
    with running(node):
        serves(node)
    done = subprocess.run(
        [
            "/bin/sh",
            "-c",
            '"$@" | head -n 2',
            "sh",
            sys.executable,
            "-m",
            "gpuactors",
            "replay",
            str(journal(node)),
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert len(done.stdout.splitlines()) == 2
    assert not done.stderr


def running(node: Node) -> DaemonProcess:
    return node.daemon("--uevents=off")
