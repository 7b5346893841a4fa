"""One node has GPUs for containers by NVIDIA's programs and for virtual machines by gpuactors: docs/operate.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node import pods
from tests.node.claims import (
    IDLE,
    ClaimNode,
    by_address,
    claims,  # noqa: F401  # a fixture
    from_template,
    request,
)
from tests.node.cluster import eventually, kubectl
from tests.node.daemonset import NAMESPACE as OURS
from tests.node.fake_host import H100_RESOURCE, HOST, NVIDIA
from tests.node.node import Node
from tests.node.nvidia.device_plugin import RESOURCE, DevicePlugin, device_plugin
from tests.node.nvidia.plugins import CONTAINERS_CLASS, NvidiasDriver, nvidias_driver
from tests.node.test_device_plugin import wait_insufficient

pytestmark = pytest.mark.nvidias_plugins

H = H100_RESOURCE
TWICE = "belongs to ['pod default/"
"""Of a GPU in two lists, both plugins have given it: which gpuactors cannot keep the other one from."""
STALE = "kubelet would give GPU-"
"""NVIDIA's plugin still lists a GPU that has left its driver: it looks for its GPUs only when it starts."""


@pytest.fixture
def theirs(node: Node) -> Iterator[DevicePlugin]:
    """NVIDIA's device plugin, to be started. At the end nobody has a GPU of it."""
    with device_plugin(node.host) as plugin:
        yield plugin
        pods.clear(node.api)
    node.excuse_no_plugin()


def move(node: Node, address: str, driver: str) -> None:
    """As `driverctl` does it: the kernel's answer is awaited."""
    devices = HOST / "sys/bus/pci/devices" / address
    (devices / "driver_override").write_text(driver)
    (devices / "driver/unbind").write_text(address)
    (HOST / "sys/bus/pci/drivers_probe").write_text(address)
    (devices / "driver_override").write_text("\n")
    assert node.host.drivers()[address] == driver


def explained(node: Node, address: str, *words: str) -> None:
    """Waits until `explain` says these words of a GPU."""

    def look() -> bool:
        told = node.daemon().run("explain", address, check=False)
        assert all(word in told for word in words), told
        return True

    eventually(look, f"{words} of {address}", 20.0, 0.3)


def renew_daemon(node: Node) -> None:
    """Another pod of gpuactors."""
    before = node.daemon()
    kubectl("delete", "pod", "-n", OURS, before.name)
    eventually(lambda: node.daemon().uid != before.uid, "another pod of gpuactors")


def test_two_device_plugins(node: Node, theirs: DevicePlugin) -> None:
    node.install()
    moves, stays, mine = (
        node.host.plug(0x21, driver=NVIDIA),
        node.host.plug(0x23, driver=NVIDIA),
        node.host.plug(0x22),
    )
    theirs.start()
    node.settled({H: 1, RESOURCE: 2})
    pods.start(node.api, "c-1", {RESOURCE: 2})
    pods.start(node.api, "vm-1", {H: 1})
    assert node.devices_of("vm-1") == {mine}
    for address in (moves, stays):
        explained(node, address, "bound to nvidia, which is no vfio driver", "default/c-1")

    node.excuse_no_plugin()
    theirs.restart()
    node.settled({H: 1, RESOURCE: 2})
    node.restart_kubelet()
    node.settled({H: 1, RESOURCE: 2})
    renew_daemon(node)
    node.settled({H: 1, RESOURCE: 2})

    # To the virtual machines, and back, by the steps of the page.
    pods.stop(node.api, "c-1")
    node.excuse(STALE, 10.0)
    move(node, moves, "vfio-pci")
    theirs.restart()
    node.settled({H: 2, RESOURCE: 1})
    pods.start(node.api, "vm-2", {H: 1})
    assert node.devices_of("vm-2") == {moves}
    pods.stop(node.api, "vm-2")
    move(node, moves, NVIDIA)
    node.settled({H: 1, RESOURCE: 1})
    theirs.restart()
    node.settled({H: 1, RESOURCE: 2})
    pods.start(node.api, "c-2", {RESOURCE: 2})


def test_a_container_keeps_a_gpu_that_is_bound_to_vfio_under_it(node: Node, theirs: DevicePlugin) -> None:
    """Theirs has given it first. The container is idle, so that nothing in the kernel keeps the GPU on its driver."""
    node.install()
    its = node.host.plug(0x21, driver=NVIDIA)
    node.host.plug(0x23, driver=NVIDIA)
    theirs.start()
    pods.start(node.api, "c-1", {RESOURCE: 2})
    node.settled({RESOURCE: 2})
    explained(node, its, "default/c-1")
    node.excuse(STALE, 60.0)
    move(node, its, "vfio-pci")
    explained(node, its, f"allocated to pod default/c-1 as {RESOURCE}")
    pods.create(node.api, pods.tenant("vm-1", {H: 1}))
    wait_insufficient(node, "vm-1")
    pods.stop(node.api, "c-1")
    theirs.restart()
    pods.wait_running(node.api, "vm-1")
    assert node.devices_of("vm-1") == {its}


def test_theirs_gives_away_what_a_virtual_machine_has(node: Node, theirs: DevicePlugin) -> None:
    """Ours has given it first. NVIDIA's plugin was not started again: its container starts, and has no GPU behind the
    node. The virtual machine keeps it."""
    node.install()
    its = node.host.plug(0x21, driver=NVIDIA)
    node.host.plug(0x23, driver=NVIDIA)
    theirs.start()
    node.settled({RESOURCE: 2})
    node.excuse(STALE, 60.0)
    node.excuse(TWICE, 60.0)
    node.excuse("free nvidia.com/gpu is more than a new pod could have", 60.0)
    move(node, its, "vfio-pci")
    pods.start(node.api, "vm-1", {H: 1})
    pods.start(node.api, "c-1", {RESOURCE: 2})
    explained(node, its, "default/vm-1", f"default/c-1 as {RESOURCE}")
    node.check_open("vm-1")
    pods.stop(node.api, "vm-1")
    explained(node, its, f"allocated to pod default/c-1 as {RESOURCE}")
    pods.stop(node.api, "c-1")
    theirs.restart()
    node.settled({H: 1, RESOURCE: 1})


def test_claims_beside_their_device_plugin(
    node: Node,
    theirs: DevicePlugin,
    claims: ClaimNode,  # noqa: F811
) -> None:
    """Both offer the GPU: who gives it first has it. Ours waits for a container; theirs does not see that a claim has
    bound its GPU, and starts a container that has it once the claim has ended."""
    its = node.host.plug(0x21, driver=NVIDIA)
    theirs.start()
    claims.offered(its)
    node.settled({RESOURCE: 1})
    pods.start(node.api, "c-1", {RESOURCE: 1})
    claims.offered()
    claims.template("gpu", request())
    claims.create("vm-1", from_template("gpu"))
    claims.waits("vm-1")
    pods.stop(node.api, "c-1")
    claims.runs("vm-1", its)

    node.excuse(STALE, 60.0)
    node.excuse("belongs to ['claim ", 60.0)
    node.excuse("free nvidia.com/gpu is more than a new pod could have", 60.0)
    pods.start(node.api, "c-2", {RESOURCE: 1})
    claims.runs("vm-1", its)
    pods.stop(node.api, "vm-1")
    claims.on({its: NVIDIA})
    claims.offered()
    pods.stop(node.api, "c-2")
    claims.offered(its)


# --- NVIDIA's DRA driver ----------------------------------------------------------------------------------------------


@pytest.fixture
def driver(node: Node) -> Iterator[NvidiasDriver]:
    """NVIDIA's DRA driver for containers alone, to be started."""
    node.uninstall()
    with nvidias_driver(node.api, node.host, gates="PassthroughSupport=false") as found:
        yield found
        pods.clear(node.api)
    node.excuse_no_plugin()


@pytest.fixture
def requests(driver: NvidiasDriver, node: Node) -> Iterator[ClaimNode]:
    """Claims of both drivers, of which nothing is left while both still run."""
    found = ClaimNode(node)
    yield found
    pods.clear(node.api)
    found.forget()


def test_their_claims_beside_the_device_plugin(
    node: Node, driver: NvidiasDriver, requests: ClaimNode
) -> None:
    its, mine = node.host.plug(0x21, driver=NVIDIA), node.host.plug(0x22)
    driver.start(driver.gpus)
    assert driver.offered().keys() == {"gpu-0"}
    node.install()
    requests.template("container", request(device_class=CONTAINERS_CLASS))
    requests.create("c-1", from_template("container"), command=IDLE)
    requests.comes_to("c-1", "Running")
    pods.start(node.api, "vm-1", {H: 1})
    assert node.devices_of("vm-1") == {mine}
    explained(node, its, "bound to nvidia, which is no vfio driver", "default/c-1")

    node.excuse_no_plugin()
    driver.gpus.stop()
    driver.start(driver.gpus)
    node.restart_kubelet()
    renew_daemon(node)
    node.settled({H: 1})
    explained(node, its, "bound to nvidia, which is no vfio driver", "default/c-1")

    # Under the idle container: the GPU is still the claim's, until its pod ends.
    move(node, its, "vfio-pci")
    explained(node, its, "in use by the claim default/c-1-gpu-")
    pods.create(node.api, pods.tenant("vm-2", {H: 1}))
    wait_insufficient(node, "vm-2")
    pods.stop(node.api, "c-1")
    pods.wait_running(node.api, "vm-2")
    assert node.devices_of("vm-2") == {its}
    pods.stop(node.api, "vm-2")
    move(node, its, NVIDIA)
    node.settled({H: 1})
    driver.gpus.stop()
    driver.start(driver.gpus)
    requests.create("c-2", from_template("container"), command=IDLE)
    requests.comes_to("c-2", "Running")


NAME = "gpu.example.com"


def test_two_dra_drivers(node: Node, driver: NvidiasDriver, requests: ClaimNode) -> None:
    """A driver name of our own, and a selector for the GPU of containers."""
    its, mine = node.host.plug(0x21, driver=NVIDIA), node.host.plug(0x22, driver=NVIDIA)
    driver.start(driver.gpus)
    chart = {"dra": {"enabled": True, "driverName": NAME, "deviceClass": True}}
    node.install_chart({**chart, "settings": {"select": [f"!address={its}"]}})
    requests.offered(mine)
    assert driver.offered().keys() == {"gpu-0", "gpu-1"}
    requests.template("container", request(selector=by_address(its), device_class=CONTAINERS_CLASS))
    requests.template("machine", request(device_class=f"vfio.{NAME}"))
    requests.create("c-1", from_template("container"), command=IDLE)
    requests.create("vm-1", from_template("machine"))
    requests.comes_to("c-1", "Running")
    requests.runs("vm-1", mine)
    assert requests.addresses("vm-1") == {"gpu": [mine]}

    node.excuse_no_plugin()
    driver.gpus.stop()
    driver.start(driver.gpus)
    # It has started without the GPU of the virtual machine; its slice of before stays until it writes the new one.
    eventually(lambda: driver.offered().keys() == {"gpu-0"}, "a slice without that GPU")
    node.restart_kubelet()
    requests.renew_daemon()
    requests.runs("vm-1", mine)
    pods.stop(node.api, "vm-1")
    requests.on({its: NVIDIA, mine: NVIDIA})
    pods.stop(node.api, "c-1")


def test_two_dra_drivers_that_offer_one_gpu(node: Node, driver: NvidiasDriver, requests: ClaimNode) -> None:
    """Both offer it: ours waits for a container, and names it."""
    its = node.host.plug(0x21, driver=NVIDIA)
    driver.start(driver.gpus)
    node.install_chart({"dra": {"enabled": True, "driverName": NAME, "deviceClass": True}})
    requests.offered(its)
    requests.template("container", request(device_class=CONTAINERS_CLASS))
    requests.template("machine", request(device_class=f"vfio.{NAME}"))
    requests.create("c-1", from_template("container"), command=IDLE)
    requests.comes_to("c-1", "Running")
    requests.offered()
    explained(node, its, "default/c-1")
    requests.create("vm-1", from_template("machine"))
    requests.waits("vm-1")
    pods.stop(node.api, "c-1")
    requests.runs("vm-1", its)

    # NVIDIA's driver still offers it: the second container has it by the scheduler's books, and no GPU behind the node.
    node.excuse("belongs to ['claim ", 60.0)
    requests.create("c-2", from_template("container"), command=IDLE)
    requests.comes_to("c-2", "Running")
    requests.runs("vm-1", its)
    pods.stop(node.api, "vm-1")
    requests.on({its: NVIDIA})
    requests.offered()
    pods.stop(node.api, "c-2")
    requests.offered(its)
