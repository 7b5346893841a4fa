"""Claims, with a daemon process and the fake kubelet of the simulation on the same sockets: found, prepared, let go."""

from __future__ import annotations

import grpc
import trio

from gpuactors_simulation.kubelet.containers import TreeTenancy
from gpuactors_simulation.kubelet.dra.surroundings import nodes_of, surroundings_of
from gpuactors_simulation.kubelet.dra.values import Surroundings
from gpuactors_simulation.kubelet.fake import open_fake_kubelet
from gpuactors_simulation.kubelet.transport import UnixTransport
from gpuactors_simulation.kubelet.values import Phase
from tests.process.daemon import WAIT_S
from tests.process.node import Node, address
from tests.process.test_claims import claims_node, daemon_of
from tests.support import dra_grpcio
from tests.support.claims import DRIVER, NODE, plugin_of, prepare
from tests.support.patience import patient

WAITING = 50


def test_a_pod_with_a_claim_runs_with_its_gpu_open_and_leaves_nothing() -> None:
    with claims_node(g23="vfio-pci") as (node, api, cdi):
        node.kubelet.stop()
        uid = api.claim("one", address(0x23))
        dra = Surroundings(
            surroundings_of(api.server).claim,
            nodes=nodes_of(lambda: [path.read_bytes() for path in cdi.glob("*.json")]),
        )
        with daemon_of(node, cdi):
            trio.run(live_and_die, node, dra, uid)
        assert list(cdi.iterdir()) == []


async def live_and_die(node: Node, dra: Surroundings, uid: str) -> None:
    """A pod that uses the claim `one`."""
    transport = UnixTransport(node.kubelet_dir)
    with trio.fail_after(WAIT_S):
        async with open_fake_kubelet(transport, tenancy=TreeTenancy(node.tree), dra=dra) as kubelet:
            await kubelet.start()
            await kubelet.until(lambda view: any(i.connected for i in view.dra.instances))
            kubelet.submit("vm", {}, uses=("one",))
            await kubelet.until(lambda view: view.pods["vm"].phase is Phase.RUNNING)
            assert node.tree.holder_of(0x23) is not None, "QEMU has the group open that the CDI file names"
            (claim,) = kubelet.view.dra.claims
            assert (claim.uid, claim.devices[0].pool) == (uid, NODE)
            kubelet.delete("vm")
            await kubelet.until(lambda view: "vm" not in view.pods)
            assert [(call.call, call.driver, call.error) for call in kubelet.dra_calls] == [
                ("prepare", DRIVER, ""),
                ("unprepare", DRIVER, ""),
            ]


def test_get_info_is_answered_within_kubelets_1_s_while_50_prepares_wait_for_one_gpu() -> None:
    gpu = address(0x23)
    with (
        claims_node(g23="vfio-pci") as (node, api, cdi),
        daemon_of(node, cdi) as daemon,
        plugin_of(node.kubelet_dir) as plugin,
    ):
        assert prepare(plugin, "first", api.claim("first", gpu)).error == ""
        stub = plugin["NodePrepareResources"]
        uids = {f"c{n}": api.claim(f"c{n}", gpu) for n in range(WAITING)}
        waiting = [
            stub.future(dra_grpcio.prepare_request(("default", name, uid)), timeout=WAIT_S)
            for name, uid in uids.items()
        ]
        for name in uids:
            daemon.wait_event("claim.waiting", claim=f"default/{name}")
        registry = node.kubelet_dir / "plugins_registry" / f"{DRIVER}-reg.sock"
        request = dra_grpcio.REGISTRATION.message("InfoRequest")()
        for _ in range(5):
            with grpc.insecure_channel(f"unix:{registry}") as registration:
                get_info = dra_grpcio.registration(registration)["GetInfo"]
                assert get_info(request, timeout=patient(dra_grpcio.GET_INFO_S)).name == DRIVER
        assert not any(call.done() for call in waiting)
        for call in waiting:
            call.cancel()
