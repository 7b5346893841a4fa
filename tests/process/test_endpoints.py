"""The HTTP endpoints of the daemon as a process, as kubelet's probes and Prometheus see them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from gpuactors.core.values.cause import Cause
from tests.process.daemon import eventually
from tests.process.node import H100, HEALTHY, Node, address, open_node, other_plugin
from tests.support.http_get import Page, get

GPU: Final = address(0x23)
OURS: Final = {H100: {GPU: HEALTHY}}
BOUNDS: Final = {"limits.LEDGER_QUIET_S": 2.0, "limits.LEDGER_S": 2.0}
"""Kubelet's list is compared with ours at a read of its ledger, which is else 30 s apart."""


def page(node: Node, path: str) -> Page:
    return get(node.http, path)


def is_ready(node: Node) -> bool:
    return page(node, "/readyz").status == 200


def wait_ready(node: Node) -> None:
    eventually(lambda: is_ready(node), "readiness")


def metrics(node: Node) -> dict[str, float]:
    """Each series with its value, read without any library."""
    found = {}
    for line in page(node, "/metrics").text.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            found[series] = float(value)
    return found


def test_readiness_follows_a_restart_of_kubelet_and_its_body_lists_what_is_missing() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon(bounds=BOUNDS) as daemon:
            daemon.wait_event("plugin.registered")
            early = page(node, "/readyz")
            assert early.status == 503
            assert f"- {H100}: it is registered, and kubelet's own list has not been compared" in early.text
            wait_ready(node)
            assert page(node, "/readyz").text == "ready\n"
            mark = daemon.mark()
            node.kubelet.stop()
            daemon.wait_event("kubelet.gone", after=mark)
            gone = page(node, "/readyz")
            assert gone.status == 503
            assert f"{node.kubelet.socket} does not exist" in gone.text
            assert page(node, "/livez").status == 200, "a kubelet that is away is no reason to end the daemon"
            node.kubelet.start()
            node.wait_device_lists(OURS)
            wait_ready(node)
            node.assert_sound(daemon)


def test_readiness_and_metrics_follow_a_plugin_that_takes_our_resource() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon(bounds=BOUNDS) as daemon:
            node.wait_device_lists(OURS)
            wait_ready(node)
            mark = daemon.mark()
            with other_plugin(node):
                node.kubelet.hold_register_replies(H100)
                daemon.wait_event("plugin.contested", after=mark)
                lost = page(node, "/readyz")
                assert lost.status == 503
                assert f"- {H100}: kubelet has 2 healthy devices that are not ours" in lost.text
                seen = metrics(node)
                assert seen[f'gpuactors_resource_contested{{resource="{H100}"}}'] == 1
                assert seen[f'gpuactors_resource_registered{{resource="{H100}"}}'] == 0
                assert seen["gpuactors_contests_total"] == 1
                assert seen["gpuactors_ready"] == 0
                node.kubelet.release_register_replies()
                node.wait_device_lists(OURS)
            wait_ready(node)
            assert metrics(node)[f'gpuactors_resource_contested{{resource="{H100}"}}'] == 0
            node.assert_sound(daemon)


def test_what_a_scrape_says_of_devices_calls_and_owners() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        node.plug(0x24, "2330", driver="vfio-pci")
        with node.daemon() as daemon:
            node.wait_device_lists({H100: {GPU: HEALTHY, address(0x24): HEALTHY}})
            before = metrics(node)
            assert before['gpuactors_calls_total{method="Allocate",outcome="granted"}'] == 0, (
                "it is there at zero"
            )
            pod = "virt-launcher-db-x7k2p"
            node.kubelet.allocate(H100, [GPU], pod=pod)
            eventually(
                lambda: any("gpuactors_device_owner_info" in line and pod in line for line in metrics(node)),
                "the pod of the GPU",
            )
            seen = metrics(node)
            devices = {
                cause: seen[f'gpuactors_devices{{cause="{cause}",health="Healthy",resource="{H100}"}}']
                for cause in (Cause.FREE, Cause.ALLOCATED, Cause.JUST_ALLOCATED)
            }
            assert devices == {Cause.FREE: 1, Cause.ALLOCATED: 1, Cause.JUST_ALLOCATED: 0}
            owners = [line for line in seen if line.startswith("gpuactors_device_owner_info")]
            assert len(owners) == 1
            for label in (f'gpu="{GPU}"', f'pod_name="{pod}"', 'vm="db"', f'resource="{H100}"'):
                assert label in owners[0]
            assert seen['gpuactors_calls_total{method="Allocate",outcome="granted"}'] == 1
            assert seen['gpuactors_call_duration_seconds_count{method="Allocate"}'] == 1
            assert 0 < seen['gpuactors_call_duration_seconds_sum{method="Allocate"}'] < 12
            eventually(lambda: metrics(node)["gpuactors_journal_bytes"] > 0, "the journal's first file")
            node.assert_sound(daemon)


def test_a_scrape_is_what_promtool_takes(tmp_path: Path) -> None:
    """Prometheus' own parser and linter, in Go: Debian's package prometheus."""
    promtool = shutil.which("promtool")
    assert promtool is not None, "./do test takes it from Debian's package prometheus"
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon():
            node.wait_device_lists(OURS)
            text = page(node, "/metrics").text
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, text=True, capture_output=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stderr


def test_a_socket_of_ours_that_is_gone_is_not_live() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon():
            node.wait_device_lists(OURS)
            assert page(node, "/livez").text == "live\n"
            os.unlink(node.endpoint(H100))
            dead = page(node, "/livez")
            assert dead.status == 503
            assert f"cannot connect to {node.endpoint(H100)}: there is no such file" in dead.text


def test_a_port_that_another_process_has_is_said_and_taken_when_it_is_free() -> None:
    with open_node() as node, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with node.daemon(f"--http-address=127.0.0.1:{port}") as daemon:
            daemon.wait_event("http.unavailable", has=[f"127.0.0.1:{port}", "another process listens there"])
            daemon.wait_event("daemon.serving")
            other.close()
            daemon.wait_event("http.listening", address=f"127.0.0.1:{port}")
            assert get(port, "/livez").status == 200
            assert get(port, "/debug/state").status == 200


def test_a_successor_takes_the_endpoints_over() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon(bounds=BOUNDS) as first:
            first.wait_event("http.listening")
            first.wait_event("daemon.serving")
            with node.daemon(tolerated=["http.unavailable"], bounds=BOUNDS) as second:
                first.wait_event("daemon.handed_over")
                second.wait_event("http.listening")
                wait_ready(node)


@pytest.mark.parametrize("path", ["/metrics", "/livez", "/readyz", "/debug/state", "/"])
def test_every_route_is_answered_and_none_takes_anything(path: str) -> None:
    with open_node(started=False) as node, node.daemon() as daemon:
        daemon.wait_event("http.listening")
        assert page(node, path).status in (200, 503)
        refused = get(node.http, path, "POST")
        assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")
        empty = get(node.http, path, "HEAD")
        assert empty.text == ""
        assert (os.stat(node.http).st_mode & 0o777) == 0o600


def test_probes_are_answered_beside_slow_clients_and_those_are_counted() -> None:
    with open_node() as node, node.daemon(tolerated=["http.crowded"]) as daemon, ExitStack() as stack:
        daemon.wait_event("http.listening")
        wait_ready(node)
        for _ in range(64):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.settimeout(5)
            client.connect(str(node.http))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n")
        for path in ("/readyz", "/livez"):
            assert page(node, path).status == 200, path
        assert metrics(node)["gpuactors_http_connections_turned_away_total"] >= 32
        assert daemon.wait_event("http.crowded")["closed"] >= 1
        node.assert_sound(daemon)


def test_a_daemon_that_offers_nothing_says_so_once_and_registers_nothing() -> None:
    """Issue 24, 14: with `--device-plugin off` alone it looked like any other daemon."""
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon("--device-plugin=off") as daemon:
            daemon.wait_event("host.scanned")
            mark = daemon.mark()
            node.kubelet.stop()
            node.kubelet.start()
            daemon.wait_event("kubelet.appeared", after=mark)
            node.tell(node.plug(0x24, "2330", driver="vfio-pci"))
            ready = page(node, "/readyz")
            assert ready.status == 503
            assert "this daemon offers nothing" in ready.text
            assert page(node, "/livez").status == 200
            # Kubelet has removed it at its start.
            eventually((node.kubelet.socket_dir / "gpuactors").is_dir, "the directory of the control socket")
        assert daemon.wait_exit() == 0
        (said,) = (line for line in daemon.log if line["event"] == "daemon.offers_nothing")
        assert all(flag in said["reason"] for flag in ("--device-plugin", "--dra", "--compute-domains"))
        assert node.kubelet.registrations == ()
        assert [*node.kubelet.socket_dir.rglob("gpuactors*")] == [node.kubelet.socket_dir / "gpuactors"]
