"""The parts that scenarios are made of: GPUs with the ids of real ones, and acts that several scenarios share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from msgspec.structs import replace

from gpuactors_simulation.host.tree import PciSpec
from gpuactors_simulation.kubelet.values import Phase
from gpuactors_simulation.world import World

VFIO: Final = "vfio-pci"
HOST_DRIVER: Final = "nvidia"
AUDIO_DRIVER: Final = "snd_hda_intel"

H100: Final = "nvidia.com/GH100_H100_SXM5_80GB"
L40S: Final = "nvidia.com/AD102GL_L40S"
RTX_6000_ADA: Final = "nvidia.com/AD102GL_RTX_6000_ADA_GENERATION"
B200: Final = "nvidia.com/GB100_B200"

_H100_SLOTS: Final = (
    ("0000:19:00.0", "pci0000:15", 0),
    ("0000:3b:00.0", "pci0000:37", 0),
    ("0000:4c:00.0", "pci0000:48", 0),
    ("0000:5d:00.0", "pci0000:59", 0),
    ("0000:9b:00.0", "pci0000:97", 1),
    ("0000:bb:00.0", "pci0000:b7", 1),
    ("0000:cb:00.0", "pci0000:c7", 1),
    ("0000:db:00.0", "pci0000:d7", 1),
)
"""Addresses, host bridges and NUMA nodes as in a server with eight of them."""

_FIRST_GROUP: Final = 47


def h100s(count: int, driver: str | None) -> tuple[PciSpec, ...]:
    """Return the first `count` of eight H100s, each in an IOMMU group of its own."""
    return tuple(
        PciSpec(address, "10de", "2330", "030200", _FIRST_GROUP + n, numa, root, driver)
        for n, (address, root, numa) in enumerate(_H100_SLOTS[:count])
    )


def gpu(address: str, device: str, group: int, driver: str | None, *, numa_node: int = 0) -> PciSpec:
    """Return a GPU in a slot of its own."""
    return PciSpec(address, "10de", device, "030200", group, numa_node, "pci0000:60", driver)


def with_audio(*gpus: PciSpec) -> tuple[PciSpec, ...]:
    """Return the GPUs, each with an audio function in its slot and IOMMU group."""
    return tuple(function for gpu in gpus for function in (gpu, _audio_of(gpu)))


def _audio_of(gpu: PciSpec) -> PciSpec:
    address = f"{gpu.address[:-1]}1"
    return replace(gpu, address=address, device="22ba", class_code="040300", driver=AUDIO_DRIVER)


Act = Callable[[World], Awaitable[None]]


def start_node(*specs: PciSpec) -> Act:
    """The node boots with these functions, then kubelet and the daemon start."""

    async def act(world: World) -> None:
        await world.plug(*specs)
        await world.kubelet.start()
        await world.start_daemon()

    return act


def start_pods(pods: Mapping[str, Mapping[str, int]]) -> Act:
    """Pods are created, one after another."""

    async def act(world: World) -> None:
        for name, requests in pods.items():
            await world.start_pod(name, requests)

    return act


def bind(addresses: tuple[str, ...], driver: str = VFIO) -> Act:
    """Functions are bound to a driver, one after another."""

    async def act(world: World) -> None:
        for address in addresses:
            await world.bind(address, driver)

    return act


def plug(*specs: PciSpec) -> Act:
    """Functions are plugged in."""

    async def act(world: World) -> None:
        await world.plug(*specs)

    return act


def end_pod(name: str) -> Act:
    """Return the act that ends a pod."""

    async def act(world: World) -> None:
        if world.kubelet.view.pods[name].phase is Phase.RUNNING:
            await world.until_in_ledger(name)
        world.end_pod(name)

    return act


def force_delete(name: str) -> Act:
    """Return the act that deletes a pod by force; its virtual machine lives on."""

    async def act(world: World) -> None:
        await world.until_in_ledger(name)
        world.force_delete_pod(name)

    return act


def start_claimed(pod: str, gpu: str) -> Act:
    """A pod is created with a claim of its own, to which the scheduler allocates this GPU."""

    async def act(world: World) -> None:
        world.claims.allocate(f"{pod}-gpu", gpu)
        world.kubelet.submit(pod, {}, uses=(f"{pod}-gpu",))

    return act


def end_claimed(pod: str) -> Act:
    """Return the act that deletes a pod, and its claim when the pod is gone."""

    async def act(world: World) -> None:
        world.end_pod(pod)
        await world.until(lambda view: pod not in view.pods, f"{pod} is gone")
        world.claims.delete(f"{pod}-gpu")

    return act


def end_process(pod: str) -> Act:
    """Return the act that ends the virtual machine of a pod, whether the pod is still there or not."""

    async def act(world: World) -> None:
        world.end_process(pod)

    return act


def take_free(resource: str, pid: int, command: str, *, device: bool = True) -> Act:
    """Return the act by which an external process opens a free GPU, or only its group."""

    async def act(world: World) -> None:
        world.take(await world.until_free(resource), pid, command, device=device)

    return act


def release(pid: int) -> Act:
    """Return the act by which a process closes every GPU that it has open, and lives on."""

    async def act(world: World) -> None:
        for address in [address for address, holder in world.holders().items() if holder == pid]:
            await world.release(address, pid)

    return act


def kill(pid: int) -> Act:
    """Return the act that kills a process with all that it has open."""

    async def act(world: World) -> None:
        await world.kill(pid)

    return act


def one_after_another(*acts: Act) -> Act:
    """Several acts as one."""

    async def act(world: World) -> None:
        for part in acts:
            await part(world)

    return act
