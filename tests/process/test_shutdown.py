"""The end of the process: bounded, with calls in flight answered first, streams ended and sockets removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.process.daemon import (
    EXIT_S,
    PATIENT_END,
    PATIENT_LOOKS,
    DaemonProcess,
    clean_environment,
    eventually,
)
from tests.process.node import A100, H100, HEALTHY, Node, address, granted, open_node, refusal
from tests.process.slow_inspection import allocate_in_flight

GPU, OTHER = address(0x23), address(0x31)
VARIABLE = "PCI_RESOURCE_NVIDIA_COM_GH100_H100_SXM5_80GB"


STOPPING = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP]


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_ends_streams_and_removes_sockets(number: signal.Signals) -> None:
    with open_node() as node, _running(node, starts=number is signal.SIGTERM) as daemon:
        # Another program's file in kubelet's directory stays.
        (node.kubelet.socket_dir / "kubelet_internal_checkpoint").write_text("{}")
        daemon.signal(number)
        assert daemon.wait_exit() == 0
        _assert_gone(node, daemon)
        assert {entry.name for entry in node.kubelet.socket_dir.rglob("*")} == {
            "kubelet.sock",
            "kubelet_internal_checkpoint",
            "gpuactors",  # without the control socket
            "served.json",
        }


def test_a_call_in_flight_is_answered_first() -> None:
    with (
        open_node() as node,
        _running(node, bounds=PATIENT_LOOKS | PATIENT_END) as daemon,
        allocate_in_flight(node, H100, GPU) as (call, inspection),
    ):
        daemon.signal(signal.SIGTERM)
        daemon.wait_event("daemon.stopping")
        # The other resource, which has nothing to finish, is over; this one's stream is still open.
        node.kubelet.wait_for(lambda _: bool(node.kubelet.stream_ends(A100)), EXIT_S)
        assert not node.kubelet.stream_ends(H100)
        assert not call.done()
        with pytest.raises(grpc.RpcError) as error:
            node.kubelet.allocate(H100, [GPU])
        assert refusal(error.value)[0] == "UNAVAILABLE", "nothing new is begun"
        inspection.end()
        assert call.result(timeout=EXIT_S) == granted(VARIABLE, GPU, "/dev/vfio/vfio", "/dev/vfio/35")
        assert daemon.wait_exit() == 0
        _assert_gone(node, daemon)
        assert node.kubelet.panics == ()


def test_an_inspection_that_never_returns_does_not_delay_the_end() -> None:
    with (
        open_node() as node,
        _running(node) as daemon,
        allocate_in_flight(node, H100, GPU) as (call, _),
    ):
        daemon.signal(signal.SIGTERM)
        daemon.signal(signal.SIGINT)  # an impatient operator
        assert daemon.wait_exit() == 0
        with pytest.raises(grpc.RpcError) as error:
            call.result(timeout=EXIT_S)
        assert refusal(error.value)[0] == "UNAVAILABLE"
        _assert_gone(node, daemon)


def test_a_signal_while_kubelet_does_not_answer_register() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        node.kubelet.hold_register_replies()
        with node.daemon() as daemon:
            eventually(node.endpoint(H100).is_socket, "the endpoint")
            daemon.signal(signal.SIGTERM)
            assert daemon.wait_exit() == 0
            assert not node.endpoint(H100).exists()
            assert node.accepted(H100) == ()


def test_a_signal_while_nothing_is_there() -> None:
    """No kubelet, no host: the end comes all the same."""
    with open_node(started=False) as node:
        with node.daemon(f"--host-root={node.directory / 'empty'}", tolerated={"scan.failed"}) as daemon:
            daemon.wait_event("scan.failed")
            daemon.wait_event("kubelet.gone")
            daemon.signal(signal.SIGTERM)
            assert daemon.wait_exit() == 0
        assert not node.uevents.exists()


def test_a_signal_that_means_nothing_changes_nothing() -> None:
    with open_node() as node, _running(node) as daemon:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            daemon.signal(number)
            daemon.wait_event("signal.ignored", signal=number.name)
        node.assert_sound(daemon)
        node.wait_device_lists({H100: {GPU: HEALTHY}, A100: {OTHER: HEALTHY}})


def test_nohup_means_what_it_says() -> None:
    with open_node(started=False) as node:
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a child inherits that a signal is ignored
        try:
            with node.daemon(starts=True) as daemon:
                daemon.wait_event("daemon.started")
                daemon.signal(signal.SIGHUP)
                daemon.signal(signal.SIGUSR1)
                daemon.wait_event("signal.ignored", signal="SIGUSR1")
                daemon.assert_alive()
                assert not [line for line in daemon.log if line["event"] == "signal.received"]
        finally:
            signal.signal(signal.SIGHUP, before)


# --- before the daemon is there ---------------------------------------------------------------------------

ALONE: tuple[str, ...] = ()
AS_PROCESS_1 = ("unshare", "--pid", "--fork", "--kill-child")
"""As in a container: the kernel drops what process 1 of a PID namespace has no handler for."""


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("around", [ALONE, AS_PROCESS_1], ids=["alone", "as process 1"])
def test_a_signal_during_the_imports_ends_it_well(
    around: tuple[str, ...], number: signal.Signals, tmp_path: Path
) -> None:
    with _importing(tmp_path, *around) as (process, pid):
        os.kill(pid, number)
        assert process.wait(timeout=EXIT_S) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b""


def test_a_signal_that_means_nothing_does_not_end_the_imports(tmp_path: Path) -> None:
    with _importing(tmp_path) as (process, pid):
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGUSR2)
        os.kill(pid, signal.SIGTERM)
        assert process.wait(timeout=EXIT_S) == 0


# --- helpers ----------------------------------------------------------------------------------------------


@contextmanager
def _importing(directory: Path, *around: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`gpuactors run`, `around` it what starts it, that stays in its imports; and its process id as seen from here."""
    if around and subprocess.run([*around, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(around)} is not allowed here")
    ready = directory / "ready"
    # A module that is imported by each command, found before the real one.
    (directory / "trio.py").write_text(f"open({str(ready)!r}, 'w').close()\nimport time\ntime.sleep(600)\n")
    path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [*around, sys.executable, "-m", "gpuactors", "run"],
        env=clean_environment({"PYTHONPATH": path}), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        eventually(ready.exists, "the import")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield process, int(children[0]) if around else process.pid
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def _running(
    node: Node, bounds: Mapping[str, float] | None = None, *, starts: bool = False
) -> Iterator[DaemonProcess]:
    """A daemon with two resources registered."""
    node.plug(0x23, "2330", driver="vfio-pci")
    node.plug(0x31, "20b0", driver="vfio-pci")
    with node.daemon(bounds=bounds, starts=starts) as daemon:
        node.wait_device_lists({H100: {GPU: HEALTHY}, A100: {OTHER: HEALTHY}})
        yield daemon


def _assert_gone(node: Node, daemon: DaemonProcess) -> None:
    """Streams ended with a status, as a server says it that knows what it does; no socket is left."""
    for resource in (H100, A100):
        node.kubelet.wait_for(lambda _, r=resource: bool(node.kubelet.stream_ends(r)), 10)  # type: ignore[misc]
        (end,) = node.kubelet.stream_ends(resource)
        assert (end.code, end.noticed) == ("UNAVAILABLE", True)
        assert "shutting down" in end.details
        assert not node.endpoint(resource).exists()
        assert len(node.accepted(resource)) == 1
    assert not node.uevents.exists()
    assert not [line for line in daemon.log if line["event"] == "daemon.stopped_late"]
