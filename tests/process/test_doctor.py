"""`gpuactors doctor` as a process: its exit codes, and what it says while it waits."""

from __future__ import annotations

import json
import signal

from tests.process.daemon import gpuactors
from tests.process.node import H100, HEALTHY, Node, address, open_node
from tests.support.terminal import OnTerminal


def words(node: Node) -> tuple[str, ...]:
    return node.directories


def test_the_exit_code_says_whether_anything_failed() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        done = gpuactors("doctor", "--pre", *words(node))
        assert done.stderr == ""
        assert done.returncode == 0, done.stdout
        assert ", before installation; settings of this command" in done.stdout.splitlines()[0]

        done = gpuactors("doctor", *words(node))
        assert done.stderr == ""
        assert done.returncode == 1
        assert "\ndaemon\n  FAIL  no daemon runs" in done.stdout

        with node.daemon():
            node.wait_device_lists({H100: {address(0x23): HEALTHY}})
            # In the daemon's pod no flag is repeated; here only where the daemon is.
            done = gpuactors("doctor", "-o", "json", words(node)[-1])
            assert done.stderr == ""
            assert done.returncode == 0, done.stdout
            assert json.loads(done.stdout)["counts"]["FAIL"] == 0


def test_wrong_words_are_no_finding() -> None:
    assert gpuactors("doctor", "-o", "table").returncode == 2
    assert gpuactors("doctor", "--select=colour=green").returncode == 78


def test_what_is_waited_for_is_said_on_a_terminal_and_taken_back() -> None:
    with open_node() as node, node.daemon() as daemon:
        daemon.wait_event("daemon.serving")
        daemon.signal(signal.SIGSTOP)
        try:
            done = gpuactors("doctor", "-o", "json", *words(node))
            with OnTerminal("doctor", *words(node)) as terminal:
                assert terminal.wait_exit() == 1
                assert "gpuactors: reading the running daemon … 1 s" in terminal.raw.decode()
        finally:
            daemon.signal(signal.SIGCONT)
        assert (done.returncode, done.stderr) == (1, "")
        failed = [f["message"] for f in json.loads(done.stdout)["findings"] if f["check"] == "DaemonRuns"]
        assert "does it hang?" in failed[0]
        assert not any("reading the running daemon" in line for line in terminal.lines())
