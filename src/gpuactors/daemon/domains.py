"""Compute domains, wired: the claims of their channels and daemons (`claims.py`, a second time), the node's label, and
what is read of domains and of the host's IMEX.

domains cell -> label_keeper  -> our Node at the API server          -> inbox
             -> domain_reader -> ComputeDomains, cliques; host/imex  -> inbox

Imported with `--compute-domains on` or `host-managed` only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

import trio
from msgspec import Struct

from gpuactors.actors import domain_reader, label_keeper
from gpuactors.actors.caller import InboxCaller
from gpuactors.actors.registry import DomainCells
from gpuactors.concurrency.latest import LatestReader
from gpuactors.config import Config
from gpuactors.core.events import Event
from gpuactors.core.state.claims import ClaimSettings
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.core.values.domain import NAMESPACES, DomainMode, DomainSettings
from gpuactors.daemon import claims as dra
from gpuactors.daemon.api_client import client_of
from gpuactors.daemon.imex_sources import host_imex
from gpuactors.grpc_trio import Owner
from gpuactors.kube.domains import KubeDomains
from gpuactors.kube.nodes import KubeNode
from gpuactors.ports.claims import ImexReader
from gpuactors.ports.errors import HostError
from gpuactors.ports.kube import DomainApi
from gpuactors.process.logger import get_logger

log = get_logger()


class DomainsOutside(Struct, frozen=True):
    """Everything that compute domains reach outside the daemon; the simulation brings its own."""

    settings: DomainSettings
    claims: dra.DraOutside
    domains: DomainApi
    imex: ImexReader


def outside_of(config: Config, node: str, hanging: LatestReader[frozenset[Owner]] | None) -> DomainsOutside:
    """Make the adaptors. Raises `ports.errors.HostError` as `dra.outside_of`, and if both drivers have one name."""
    mode, driver = DomainMode(config.compute_domains), config.domains_driver
    if config.dra == "on" and driver == config.driver_name:
        raise HostError(
            f"--driver-name and --domains-driver are both {driver}: kubelet and the scheduler know a DRA "
            "driver by its name, so give each its own"
        )
    client = client_of(config)
    namespaces = (config.domains_namespace,) if config.domains_namespace is not None else NAMESPACES
    settings = DomainSettings(
        mode,
        node,
        namespaces,
        driver,
        config.imex_channels,
        dra.mounted_dir(config, driver),
        side_by_side=dra.instance() is not None,
    )
    return DomainsOutside(
        settings=settings,
        claims=dra.of_driver(config, ClaimSettings(driver, node), client, hanging),
        domains=KubeDomains(client),
        imex=host_imex(config, KubeNode(client, node)),
    )


@final
class DomainActors:
    """The actors of compute domains."""

    def __init__(
        self,
        outside: DomainsOutside,
        cells: DomainCells,
        caller: InboxCaller,
        inbox: trio.MemorySendChannel[Event],
    ) -> None:
        self._outside = outside
        self._cells = cells
        self._inbox = inbox
        self._claims = dra.DraActors(outside.claims, cells.claims, caller, inbox, ClaimsOf.DOMAINS)

    def start(self, actor: Callable[[str, Callable[[], Awaitable[None]]], None]) -> None:
        """Implement `DraActors.start`."""
        outside, wanted, inbox = self._outside, self._cells.wanted, self._inbox
        self._claims.start(actor)
        node, api, imex = outside.claims.node, outside.domains, outside.imex
        actor("label_keeper", lambda: label_keeper.run(wanted.subscribe(), node, inbox, _unwatched_node))
        actor(
            "domain_reader",
            lambda: domain_reader.run(wanted.subscribe(), api, imex, inbox, _unwatched_domains),
        )

    async def withdrawn(self) -> None:
        """Implement `DraActors.withdrawn`."""
        await self._claims.withdrawn()


def _unwatched_node(reason: str) -> None:
    log.warning("node.unwatched", reason=reason)


def _unwatched_domains(reason: str) -> None:
    log.warning("domains.unwatched", reason=reason)
