"""The part of many daemons that talks to the API server: their own actors and adaptors, for one virtual node each.

Left out is everything that stays on the node: sysfs, kubelet's sockets, the core. The orders that the core would give
are given here. The label is read at the start and after each hint (`core/domains/label.py`); a domain that a claim
waits for is read after each hint, else every DOMAIN_READ_S (`core/domains/reads.py`).
"""

from __future__ import annotations

from typing import Final

import trio
from msgspec import Struct
from msgspec.structs import replace

from gpuactors.actors import domain_reader, label_keeper, slice_publisher
from gpuactors.actors.api_retry import backoff_s
from gpuactors.actors.class_reader import CLASSES_TRIES
from gpuactors.concurrency.latest import Latest
from gpuactors.core.domains.offer import offered_device
from gpuactors.core.domains.outputs import NO_DOMAINS_WANTED, DomainReadWanted, DomainsWanted
from gpuactors.core.domains.reads import DOMAIN_READ_S
from gpuactors.core.events import Event
from gpuactors.core.events.domains import DomainRead, DomainsTouched, NodeTouched
from gpuactors.core.values.domain import DRIVER as DOMAINS_DRIVER
from gpuactors.core.values.domain import DeviceKind, DomainDevice, DomainUid, ImexFacts
from gpuactors.core.values.slices import Offer, Publication
from gpuactors.kube.client import ApiClient
from gpuactors.kube.device_classes import KubeDeviceClasses
from gpuactors.kube.domains import KubeDomains
from gpuactors.kube.nodes import KubeNode
from gpuactors.kube.slices import KubeSlices
from gpuactors.ports.kube import ApiError
from tests.kube.cluster import DRIVER, NAMESPACE
from tests.support.offered import offered_gpu

GPUS: Final = 8
CLIQUE: Final = "3f1c2a10-0000-4000-8000-00000000000a.7"
_MEMORY_BYTES: Final = 80 * 1024**3


class Served(Struct, frozen=True):
    """The settings of the daemons: `--dra on`, and `--compute-domains on` where `domains`."""

    domains: bool = False


def node_name(number: int) -> str:
    return f"gpu-node-{number:05}"


def gpu_offer(node: str) -> Offer:
    """Eight GPUs on vfio, as a node with HGX H100 offers them."""
    gpus = tuple(
        offered_gpu(
            f"0000:{0x1B + 0x10 * number:02x}:00.0", 40 + number, model="GH100_H100_SXM5_80GB", numa_node=number // 4,
            pcie_root=f"pci0000:{0x15 + 0x10 * number:02x}", memory_bytes=_MEMORY_BYTES,
        )
        for number in range(GPUS)
    )  # fmt: skip
    return Offer(DRIVER, node, gpus)


def domain_offer(node: str) -> Offer:
    """A channel and the daemon."""
    kinds = (DeviceKind.CHANNEL, DeviceKind.DAEMON)
    return Offer(DOMAINS_DRIVER, node, tuple(offered_device(DomainDevice(kind, 0)) for kind in kinds))


class Daemon:
    """One node's daemon, as the API server knows it."""

    def __init__(self, name: str, client: ApiClient, served: Served) -> None:
        self.name = name
        self._client = client
        self._served = served
        self._settled: dict[str, bool] = {}
        self.changed = trio.Event()
        """`settled` may be another, or `waits_for`."""
        self._wanted = Latest[DomainsWanted](NO_DOMAINS_WANTED)
        self.waits_for: DomainUid | None = None

    @property
    def settled(self) -> bool:
        """All slices are as offered."""
        return bool(self._settled) and all(self._settled.values())

    async def run(self) -> None:
        """From the start of the process to its end, by cancellation."""
        drivers = (DRIVER, DOMAINS_DRIVER) if self._served.domains else (DRIVER,)
        self._settled = dict.fromkeys(drivers, False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._client.keep)
            nursery.start_soon(self._publish, gpu_offer(self.name))
            nursery.start_soon(self._list_classes)
            if self._served.domains:
                nursery.start_soon(self._publish, domain_offer(self.name))
                nursery.start_soon(self._follow_domains)

    def claim(self, domain: DomainUid) -> None:
        """A claim of the domain's channel comes, and waits until this node is ready."""
        self.waits_for = domain
        self._wanted.set(replace(self._wanted.value, watched=(domain,)))
        self._read_domain()

    # --- slices -------------------------------------------------------------------------------------------

    async def _publish(self, offer: Offer) -> None:
        ports = slice_publisher.PublisherPorts(
            KubeSlices(self._client, offer.driver, self.name), KubeNode(self._client, self.name), self._tell
        )
        await slice_publisher.run(Latest[Offer | None](offer).subscribe(), ports)

    async def _tell(self, told: Publication) -> None:
        await trio.lowlevel.checkpoint()
        self._settled[told.driver] = told.settled and not told.problem
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def _list_classes(self) -> None:
        """As `class_reader`, which gives up after a minute."""
        for failures in range(1, CLASSES_TRIES + 1):
            try:
                await KubeDeviceClasses(self._client).list_classes()
                return
            except ApiError as exc:
                await trio.sleep(backoff_s(failures, exc))

    # --- compute domains ----------------------------------------------------------------------------------

    async def _follow_domains(self) -> None:
        send, inbox = trio.open_memory_channel[Event](16)
        wanted, node = self._wanted, KubeNode(self._client, self.name)
        wanted.set(DomainsWanted(label_read=1))
        api = KubeDomains(self._client)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(label_keeper.run, wanted.subscribe(), node, send, _unwatched)
            nursery.start_soon(domain_reader.run, wanted.subscribe(), api, _NoImex(), send, _unwatched)
            while True:
                with trio.move_on_after(DOMAIN_READ_S if self.waits_for else float("inf")) as late:
                    self._take(await inbox.receive())
                if late.cancelled_caught:
                    self._read_domain()

    def _take(self, event: Event) -> None:
        match event:
            case NodeTouched():
                self._wanted.set(replace(self._wanted.value, label_read=self._wanted.value.label_read + 1))
            case DomainsTouched() if self.waits_for is not None:
                self._read_domain()
            case DomainRead(clique=clique) if clique is not None and self.name in clique.ready_nodes:
                self.waits_for = None
                self._wanted.set(replace(self._wanted.value, domains=(), watched=()))
                self._wake()
            case _:
                pass

    def _read_domain(self) -> None:
        assert self.waits_for is not None
        reads = self._wanted.value.domains
        number = reads[0].number + 1 if reads else 1
        read = DomainReadWanted(number, self.waits_for, CLIQUE, NAMESPACE)
        self._wanted.set(replace(self._wanted.value, domains=(read,)))


class _NoImex:
    """Implements `ports.node.ImexReader`; nobody asks."""

    async def read(self) -> ImexFacts:
        raise AssertionError("no read of IMEX was ordered")


def _unwatched(_: str) -> None:
    """Nobody reads a log here."""
