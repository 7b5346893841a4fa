"""The reasons why kubelet cannot yet allocate what this daemon offers, as sentences; for the readiness probe.

An open stream of gpuactors is no proof: another plugin may have our resource's name since. So a resource is registered
when a read of kubelet's own list has shown ours (`deviceplugin/listing.py`), which is requested KUBELET_LIST_TAKEN_S
after the registration. A kubelet that has no such list to show is believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuactors.core.deviceplugin import registration
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import PluginState, Role

OFFERS_NOTHING: Final = (
    "this daemon offers nothing: the device plugin is off, and so are claims and compute domains; set --device-plugin, "
    "--dra or --compute-domains to on, or keep the daemon off this node"
)


def offers_anything(state: NodeState) -> bool:
    """Return whether kubelet can get a device of any API from this daemon, by its settings."""
    return state.daemon.settings.device_plugin or state.serves_claims


def unmet_prerequisites(state: NodeState) -> tuple[str, ...]:
    """Return every prerequisite that is missing, as sentences; empty if the daemon is ready."""
    return tuple(_unmet_prerequisites(state))


def _unmet_prerequisites(state: NodeState) -> Iterator[str]:
    if state.daemon.stopping:
        yield "this daemon is stopping"
    elif state.daemon.role is not Role.SERVING:
        yield f"this daemon does not serve: it is {state.daemon.role}"
    if not offers_anything(state):
        yield OFFERS_NOTHING
    if not state.host.scanned:
        yield "the node's PCI functions have not been read yet"
    ledger = state.kubelet.ledger
    if ledger.problem or not ledger.read:
        yield f"kubelet's ledger: {ledger.problem or 'it has not been read yet'}"
    if state.kubelet.socket is None and state.daemon.settings.device_plugin:
        yield state.kubelet.missing or "kubelet's socket has not been looked for yet"
    for resource, plugin in sorted(state.published.plugins.items()):
        if problem := _unregistered(plugin):
            yield f"{resource}: {problem}"
    yield from _of_claims(state)


def _unregistered(plugin: PluginState) -> str:
    """Return why kubelet may not have this resource from this daemon, as a sentence; empty if it has."""
    if not registration.is_registered(plugin):
        return plugin.problem or "it is not registered"
    listing = plugin.listing
    if listing.against:
        return "kubelet's own list differed from ours at the last read"
    if listing.agreed_since is None and registration.is_uncompared(plugin):
        return "it is registered, and kubelet's own list has not been compared with ours yet"
    return ""


def _of_claims(state: NodeState) -> Iterator[str]:
    for claims in state.all_claims:
        if claims.settings is None:
            continue
        name = claims.settings.driver
        if claims.unserved:
            yield f"claims of {name}: {claims.unserved}"
        elif not claims.loaded:
            yield f"claims of {name}: their checkpoint has not been read yet"
        elif claims.unwritten:
            yield f"claims of {name}: {claims.unwritten}"
        elif claims.publication is None:
            yield f"claims of {name}: no ResourceSlice has been published yet"
        elif claims.publication.problem:
            yield f"claims of {name}: {claims.publication.problem}"
