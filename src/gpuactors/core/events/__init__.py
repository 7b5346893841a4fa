"""Events, as values. Past tense: an event is something that an adaptor saw, never a request.

An event carries no callback, no channel and no exception. A hint ("something changed there") is an event as well, and
never a fact: it only makes the core request an inspection.
"""

from __future__ import annotations

from typing import TypeAlias

from gpuactors.core.events import claims, daemon, deviceplugin, domains, host, kubelet, partitions

__all__ = ["Event", "claims", "daemon", "deviceplugin", "domains", "host", "kubelet", "partitions"]

Event: TypeAlias = (
    host.HostEvent
    | host.UsageEvent
    | kubelet.LedgerEvent
    | kubelet.KubeletEvent
    | deviceplugin.PluginEvent
    | deviceplugin.CallEvent
    | deviceplugin.SpecsWritten
    | claims.ClaimEvent
    | claims.FitnessChecked
    | domains.DomainEvent
    | partitions.PartitionEvent
    | daemon.ConfigEvent
    | daemon.DaemonEvent
    | daemon.Ticked
)
