"""`gpuactors inspect --watch` as a user has it: on a terminal, in a pipe, and while daemons come and go."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from tests.process.daemon import WAIT_S, DaemonProcess, clean_environment, gpuactors
from tests.process.node import H100, HEALTHY, Node, address, open_node
from tests.support.forked import Forked
from tests.support.terminal import OnTerminal

GPUS = range(1, 17)
OTHER_SCREEN, THIS_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
CURSOR = b"\x1b[?25h"
GREEN = b"\x1b[32m"
GREEN_ON_SCREEN = b"\x1b[0;32;49m"
NO_LOOK = b"\x1b[0;39;49m"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with open_node() as found:
        for slot in GPUS:
            found.plug(slot, "2330", driver="vfio-pci", numa_node=slot % 2)
        yield found


def words(node: Node) -> tuple[str, ...]:
    return ("inspect", "--watch", f"--state-dir={node.directory / 's'}")


@contextmanager
def serving(node: Node) -> Iterator[DaemonProcess]:
    """A daemon, as soon as kubelet has its list."""
    with node.daemon() as daemon:
        daemon.wait_event("daemon.serving")
        node.wait_device_lists({H100: {address(slot): HEALTHY for slot in GPUS}})
        yield daemon


def gpus(lines: list[str]) -> int:
    return sum(line[2:].startswith("0000:") for line in lines)


def test_a_terminal_shows_what_changes_through_restart_and_hand_over_and_is_given_back(node: Node) -> None:
    with serving(node) as first, OnTerminal(*words(node)) as terminal:
        lines = terminal.wait(lambda lines: gpus(lines) == 16, "all GPUs")
        assert f"process {first.pid}, serving" in lines[0]
        assert terminal.raw.startswith(OTHER_SCREEN)
        assert GREEN_ON_SCREEN in terminal.raw
        assert terminal.modes() != terminal.at_first, "what is typed must not be seen"

        node.tell(node.tree.unbind(address(3)))
        lines = terminal.wait_text("last change 0 s ago: 0000:03:00.0  not listed  NotBound")
        assert next(line for line in lines if "GH100" in line).split()[1:] == ["15", "15", "0", "15", "0"]
        node.tell(node.tree.bind(address(3), "vfio-pci"))
        terminal.wait_text("last change 0 s ago: 0000:03:00.0  Healthy")

        terminal.resize(80, 30)
        lines = terminal.wait(lambda lines: gpus(lines) == 16 and "NUMA" not in "".join(lines), "narrower")
        assert max(map(len, lines)) <= 80

        with serving(node) as second:  # an update
            first.signal(signal.SIGTERM)
            first.wait_exit()
            terminal.wait_text(f"process {second.pid}, serving")
            assert b"is gone since" not in terminal.raw
            second.signal(signal.SIGTERM)
            second.wait_exit()
            lines = terminal.wait_text("the daemon is gone since 2 s; still trying")
            assert gpus(lines) == 16, "what it said last"
        with serving(node) as third:
            terminal.wait_text(f"process {third.pid}, serving")
            assert not any("gone" in line for line in terminal.lines())
            terminal.type("\x03")  # Ctrl-C
            assert terminal.wait_exit() == 0
    assert terminal.raw.count(THIS_SCREEN) == 1
    assert terminal.raw.endswith(THIS_SCREEN + CURSOR)


@pytest.fixture(scope="module")
def daemon(node: Node) -> Iterator[DaemonProcess]:
    with serving(node) as found:
        yield found


def test_sigterm_gives_the_terminal_back(node: Node, daemon: DaemonProcess) -> None:
    with OnTerminal(*words(node), env={"NO_COLOR": "1"}) as terminal:
        terminal.wait(lambda lines: gpus(lines) == 16, "all GPUs")
        assert {*re.findall(rb"\x1b\[[0-9;]*m", terminal.raw)} == {NO_LOOK}, "no colour, nor any other look"
        assert terminal.wait_exit(signal.SIGTERM) == 0
        assert terminal.modes() == terminal.at_first
        assert terminal.raw.endswith(THIS_SCREEN + CURSOR)


def test_ctrl_z_leaves_the_terminal_to_the_shell_until_fg(node: Node, daemon: DaemonProcess) -> None:
    watch = f"{sys.executable} -m gpuactors {shlex.join(words(node))}"
    with OnTerminal("-mc", f"{watch}; echo stopped; read line; fg", program=("/bin/sh",)) as terminal:
        terminal.wait(lambda lines: gpus(lines) == 16, "all GPUs")
        terminal.type("\x1a")  # Ctrl-Z
        terminal.wait_text("stopped")
        assert terminal.raw.count(THIS_SCREEN) == 1
        assert terminal.modes() == terminal.at_first
        terminal.type("\n")
        terminal.wait(lambda lines: terminal.raw.count(OTHER_SCREEN) == 2, "it has the terminal again")
        terminal.wait(lambda lines: gpus(lines) == 16, "it draws again")
        terminal.type("q")
        assert terminal.wait_exit() == 0
        assert terminal.modes() == terminal.at_first


def selected(lines: list[str]) -> str:
    return next((line.split()[1] for line in lines if line.startswith("> ")), "")


def test_keys_select_explain_and_go_back(node: Node, daemon: DaemonProcess) -> None:
    with OnTerminal(*words(node), columns=80, rows=14) as terminal:
        terminal.wait(lambda lines: selected(lines) == address(1), "the first GPU is selected")
        assert "1-10 of 20" in terminal.lines()[-1], "more than fit"
        terminal.type("\x1b[B\x1b[B")
        terminal.wait(lambda lines: selected(lines) == address(3), "two further")
        terminal.type("\x1b[F")
        terminal.wait(lambda lines: selected(lines) == address(16), "the last")
        terminal.type("\r")
        terminal.wait_text(f"gpuactors explain {address(16)}, as of ")
        assert any("Healthy: free" in line for line in terminal.lines())
        terminal.type("\x1b[F")
        terminal.wait_text("Seen by")
        terminal.type("\x1b")  # Esc alone
        terminal.wait(lambda lines: selected(lines) == address(16), "back, where it was")
        terminal.type("\x1b[H\rq")
        terminal.wait(lambda lines: "GH100" in selected(lines), "the resource was explained, and q went back")
        terminal.type("q")
        assert terminal.wait_exit() == 0
        assert terminal.modes() == terminal.at_first


def test_without_a_terminal_to_type_on_the_screen_has_no_keys(node: Node, daemon: DaemonProcess) -> None:
    with OnTerminal(
        "-c",
        f"exec {sys.executable} -m gpuactors {shlex.join(words(node))} < /dev/null",
        columns=80,
        program=("/bin/sh",),
    ) as terminal:
        lines = terminal.wait_text("no keys, as standard input is not this terminal")
        assert gpus(lines) == 16
        assert not selected(lines)
        terminal.type("q\x03")
        assert terminal.wait_exit() == 0
        assert terminal.raw.endswith(THIS_SCREEN + CURSOR)


def test_in_the_background_it_draws_without_keys_and_is_not_stopped(
    node: Node, daemon: DaemonProcess
) -> None:
    watch = f"{sys.executable} -m gpuactors {shlex.join(words(node))}"
    with OnTerminal("-mc", f"{watch} & read line; kill %1; wait %1", program=("/bin/sh",)) as terminal:
        terminal.wait_text("no keys, as standard input is not this terminal")
        assert terminal.modes() == terminal.at_first
        terminal.type("\n")
        assert terminal.wait_exit() == 0
        assert terminal.raw.endswith(THIS_SCREEN + CURSOR)


def test_a_terminal_that_is_gone_ends_it_with_a_sentence(node: Node, daemon: DaemonProcess) -> None:
    ours, its = os.openpty()
    with open(its, "wb", buffering=0), tempfile.TemporaryFile("w+") as said:
        process = Forked(
            words(node), stdout=its, stderr=said.fileno(), env={**clean_environment(), "TERM": "xterm"}
        )
        with open(ours, "rb", buffering=0) as terminal:
            while OTHER_SCREEN not in terminal.read(1 << 16):
                pass
        assert process.wait(WAIT_S) == 73
        said.seek(0)
        assert said.read().startswith("gpuactors: standard output cannot be written: Input/output error; ")


def test_a_terminal_has_the_table_in_colour_and_in_its_width(node: Node, daemon: DaemonProcess) -> None:
    once = [word for word in words(node) if word != "--watch"]
    with OnTerminal(*once, columns=80, rows=40) as terminal:
        assert terminal.wait_exit() == 0
        assert GREEN in terminal.raw
        lines = [line.rstrip() for line in terminal.lines()]
        plain = gpuactors(*once, env={"COLUMNS": "80"}).stdout
        assert "\n".join(lines) == plain.rstrip(), "the same text"
        assert "\x1b" not in plain
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        with OnTerminal(*once, columns=80, rows=40, env=env) as terminal:
            assert terminal.wait_exit() == 0
            assert b"\x1b" not in terminal.raw


def test_in_a_pipe_a_line_or_a_document_is_written_for_each_change(node: Node, daemon: DaemonProcess) -> None:
    outputs = ("table", "json", "yaml")
    running = [Forked([*words(node), "-o", output], env=clean_environment()) for output in outputs]
    as_table, as_json, as_yaml = running
    assert as_table.stdout is not None
    assert as_json.stdout is not None
    assert as_yaml.stdout is not None
    before = json.loads(as_json.stdout.readline())
    head = [as_table.stdout.readline() for _ in range(22)]
    assert head[0].startswith("Node ")
    assert gpus(head) == 16
    assert as_yaml.stdout.readline() == "---\n"
    node.tell(node.tree.unbind(address(5)))
    time, *changed = as_table.stdout.readline().rstrip().split("  ")
    assert time.endswith("Z")
    assert changed == [
        address(5),
        "not listed",
        "NotBound",
        "bound to no driver; bind it to vfio-pci to offer it",
    ]
    after = json.loads(as_json.stdout.readline())
    assert [device["listed"] for device in before["devices"]] == [True] * 16
    assert [device["address"] for device in after["devices"] if not device["listed"]] == [address(5)]
    node.tell(node.tree.bind(address(5), "vfio-pci"))
    for process in running:
        process.send_signal(signal.SIGTERM)
    rest = [process.stdout.read() for process in running if process.stdout is not None]
    assert [process.wait(WAIT_S) for process in running] == [0, 0, 0]
    first, *_ = yaml.safe_load_all("---\n" + rest[2])
    assert first.keys() == before.keys()
    assert "\x1b" not in "".join(rest + head)


def test_without_a_daemon_there_is_nothing_to_watch(node: Node) -> None:
    done = gpuactors("inspect", "--watch", f"--state-dir={node.directory / 'nobody'}")
    assert done.returncode == 69
    assert done.stderr.startswith("gpuactors: nothing to watch: no daemon runs (no process listens at ")
