"""A command's own view of the node, where no daemon runs: one inspection, assessed by the same core that the daemon
runs, from the same three sources: sysfs, kubelet's ledger, the use of the groups. It opens no device and has no
history. Must not write anything anywhere.
"""

from __future__ import annotations

from typing import Final

import trio
from msgspec.structs import replace

from gpuactors.actors import pod_resources, sets_reader
from gpuactors.cli.progress import Progress
from gpuactors.config import Config
from gpuactors.control.node_view import view_of
from gpuactors.control.view import NodeView
from gpuactors.core.deviceplugin import specs
from gpuactors.core.events import Event
from gpuactors.core.events.deviceplugin import SpecsWritten
from gpuactors.core.events.host import GroupsObserved, HostScanned
from gpuactors.core.kinds.sets import SetSource
from gpuactors.core.reports.snapshot import project
from gpuactors.core.state import NodeState
from gpuactors.core.step import initial_state, step
from gpuactors.core.values.mediated import HostPart, functions_of, mediated_of
from gpuactors.daemon.app import settings_of, sysfs_of
from gpuactors.host.cdi import CdiFiles
from gpuactors.host.egm import EgmReader
from gpuactors.host.pod_cgroups import PodCgroups
from gpuactors.host.reader import ThreadedReader
from gpuactors.host.root import HostRoot
from gpuactors.host.use import SysfsUse
from gpuactors.kubelet.ledger import KubeletLedger
from gpuactors.ports.node import CdiReader, LedgerReader, UseReader

_ROUNDS: Final = 8
"""The most reads and polls of the command's own inspection: the first of each, and those that the core requests after
their results."""


def view(config: Config, progress: Progress) -> NodeView:
    """Inspect the node. Raises `ports.errors.HostError` if it cannot be read."""

    async def read() -> NodeView:
        return await progress.during("the host and kubelet's ledger", lambda: _inspect_host(config))

    return trio.run(read)


async def _inspect_host(config: Config) -> NodeView:
    root = HostRoot(str(config.host_root))
    ledger = KubeletLedger(str(config.kubelet_dir), str(config.device_plugin_dir), pods=PodCgroups(root))
    cdi = CdiFiles(root, str(config.cdi_dir))
    use = SysfsUse(root, "proc" if config.holders == "proc" else "passive")
    return await assessed(config, await ThreadedReader(sysfs_of(config)).scan(), ledger, use, cdi)


async def assessed(
    config: Config,
    parts: tuple[HostPart, ...],
    ledger: LedgerReader,
    use: UseReader,
    cdi: CdiReader | None = None,
) -> NodeView:
    """Return the view of a node with these functions and mediated devices, by the core that the daemon runs. `ledger`
    and `use` are read as often as the core requests it."""
    state = initial_state(settings_of(config))
    number = project(state).inspections.scan
    assert number is not None
    event: Event | None = HostScanned(number, functions_of(parts), mediated_of(parts))
    for _ in range(_ROUNDS):
        if event is None:
            break
        state, _effects = step(state, event, trio.current_time())
        event = await _answer(state, ledger, use, cdi)
    if (files := specs.wanted(state)) is not None:  # a daemon would write them first
        state, _effects = step(state, SpecsWritten(files.specs, {}), trio.current_time())
    egms = await sets_reader.observed(SetSource.EGM, EgmReader(HostRoot(str(config.host_root))))
    state, _effects = step(state, egms, trio.current_time())
    # This command needs no uevents: it has just scanned.
    return replace(view_of(state, trio.current_time()), uevents_problem="")


async def _answer(
    state: NodeState, ledger: LedgerReader, use: UseReader, cdi: CdiReader | None
) -> Event | None:
    """Make the next read or poll that the core requests; None if it requests none."""
    snapshot = project(state)
    if snapshot.ledger.read is not None:
        return await pod_resources.read(snapshot.ledger.read, snapshot.ledger, ledger, cdi)
    if (poll := snapshot.inspections.poll).poll is not None:
        return GroupsObserved(poll.poll, await use.observe(poll.targets, whole=True))
    return None
