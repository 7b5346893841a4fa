"""The sources of IMEX facts, wired: the daemon and `doctor` ask the same ones, in the same order.

The clique: the operator's setting alone, if it is set; else NVML, the Node's label, the features file. If none of them
has it any more, their last answer, and then the claims' files.
"""

from __future__ import annotations

from typing import final

from gpuactors.config import Config
from gpuactors.core.domains.clique import LABEL, Said, parsed
from gpuactors.core.values.domain import DomainMode
from gpuactors.host.imex import CliqueOfClaims, CliqueSource, HostImex, Operators
from gpuactors.host.imex_ctl import ImexCtl
from gpuactors.host.management import ManagementDevice
from gpuactors.host.nvml import NvmlClique
from gpuactors.host.root import HostRoot
from gpuactors.ports.kube import ApiError, NodeApi


def host_imex(config: Config, node: NodeApi | None) -> HostImex:
    """Make the reader of the host's IMEX. `node`: None if there is no access to the API server."""
    mode = DomainMode(config.compute_domains)
    sources: tuple[CliqueSource, ...] = (
        (NvmlClique(),) if node is None else (NvmlClique(), NodeLabelClique(node))
    )
    return HostImex(
        HostRoot(str(config.host_root)),
        clique_file=str(config.imex_clique),
        ctl=ImexCtl(str(config.imex_ctl)) if mode is DomainMode.HOST_MANAGED else None,
        sources=(Operators(config.clique),) if config.clique is not None else sources,
        management=ManagementDevice(config.imex_management, str(config.cdi_dir))
        if mode is DomainMode.ON
        else None,
        claims=CliqueOfClaims(str(config.cdi_dir), config.domains_driver),
    )


@final
class NodeLabelClique:
    """Implements `host.imex.CliqueSource`: the label of our Node."""

    def __init__(self, node: NodeApi) -> None:
        self._node = node

    async def said(self) -> Said:
        """Implement `CliqueSource.said`."""
        source = f"the Node's label {LABEL}"
        try:
            value = (await self._node.read()).labels.get(LABEL)
        except ApiError as error:
            return Said(source, why=f"cannot be read ({error})")
        return parsed(source, value) if value is not None else Said(source, why="is not there")
