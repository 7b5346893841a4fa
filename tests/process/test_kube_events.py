"""Kubernetes Events of a daemon process, with an API server on loopback and grpcio as kubelet."""

from __future__ import annotations

from typing import Any, Final

from gpuactors_simulation.kube.server import ApiFault
from tests.process.daemon import DaemonProcess, eventually, gpuactors
from tests.process.node import H100, UNHEALTHY, Node, address
from tests.process.test_claims import claims_node
from tests.process.test_domains import Call
from tests.support.claims import NODE, Api, plugin_of, prepare

GPU: Final = address(0x23)

AT_ONCE: Final = {
    "limits.EVENT_SETTLE_S": 0.2,
    "limits.EVENT_AGAIN_S": 0.5,
    "actors.event_poster.EVENT_LOOK_S": 0.05,
    "actors.feature_keeper.FEATURES_REST_S": 0.05,
}
"""Bounds of a daemon that tells what it sees without waiting whether it lasts."""


def daemon_of(node: Node, *words: str) -> DaemonProcess:
    return node.daemon(
        "--events=on",
        f"--node-name={NODE}",
        f"--kubeconfig={node.directory / 'kubeconfig'}",
        f"--cdi-dir={node.directory / 'cdi'}",
        *words,
        bounds=AT_ONCE,
    )


def told(api: Api) -> dict[tuple[str, str], dict[str, Any]]:
    """The events by object and reason."""
    return {(e["involvedObject"]["name"], e["reason"]): e for e in api.do(api.server.events)}


def methods(api: Api) -> set[str]:
    """The methods of all requests until now."""
    return {method for method, _ in api.do(list, api.server.requests)}


def test_foreign_hands_are_told_on_the_node_and_a_waiting_claim_to_its_pod_in_the_words_of_explain() -> None:
    with claims_node(g23="vfio-pci") as (node, api, _):
        node.tree.open_group(0x23, pid=4711, command="stress")
        uid = api.claim("one", GPU)
        api.do(api.server.reserve_claim, "default", "one", "vm")
        features = node.directory / "features"
        with (
            daemon_of(node, "--dra=on", f"--nfd-file={features}") as daemon,
            plugin_of(node.kubelet_dir) as plugin,
        ):
            node.wait_device_lists({H100: {GPU: UNHEALTHY}})
            eventually(features.exists, "the file for Node Feature Discovery")
            assert "/GH100_H100_SXM5_80GB=1\n" in features.read_text()
            Call(prepare, plugin, "one", uid)
            eventually(lambda: len(told(api)) == 2, "both events")
            on_node, on_pod = told(api)[NODE, "HeldByOther"], told(api)["vm", "HeldByOther"]
            _, _, reason = on_node["message"].partition(f"{GPU}: ")
            where = (f"--host-root={node.tree.root}", f"--state-dir={node.directory / 's'}")
            assert reason in gpuactors("explain", GPU, *where).stdout
            line = daemon.wait_event("claim.waiting", claim="default/one")
            assert on_pod["message"] == f"claim default/one: {line['reason']}"
            assert on_pod["involvedObject"]["namespace"] == "default"
        # A daemon that starts while it stands finds the event that is there.
        assert "PATCH" not in methods(api)
        with daemon_of(node):
            eventually(lambda: "PATCH" in methods(api), "the event's new time")
        assert len(api.do(api.server.events)) == 2


def test_without_the_right_it_is_logged_once_and_costs_nobody_anything() -> None:
    with claims_node(g23="vfio-pci") as (node, api, _):
        node.tree.open_group(0x23, pid=4711, command="stress")
        api.do(api.server.order, ApiFault.FORBIDDEN, 1, "POST")
        with daemon_of(node) as daemon:
            daemon.wait_event("events.unposted", has=["Grant its service account this verb on this resource"])
            node.wait_device_lists({H100: {GPU: UNHEALTHY}})
            eventually(lambda: (NODE, "HeldByOther") in told(api), "the event, when it is allowed")
            assert [line["event"] for line in daemon.log].count("events.unposted") == 1
            node.assert_sound(daemon)
