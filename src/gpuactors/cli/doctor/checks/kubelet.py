"""Kubelet: its directory and sockets, its ledger, and whether another plugin has our resources."""

from __future__ import annotations

from collections.abc import Iterator

from gpuactors.cli.doctor.facts import Facts, NoDaemon, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, Level, failed, passed, sentence, warned
from gpuactors.control.client import Running
from gpuactors.core.deviceplugin.listing import SWITCH_OFF
from gpuactors.core.values.quote import first_of, quoted_ids, quoted_name
from gpuactors.kubelet.look import PluginDirectory

_START = (
    "Start kubelet on this node (systemctl status kubelet), or name its directory with --device-plugin-dir."
)


def check(facts: Facts) -> Iterator[Finding]:
    """Check kubelet. Before installation its absence is no failure: the node may join later."""
    directory = facts.directory
    absent = Level.WARN if facts.pre else Level.FAIL
    if isinstance(directory, Unknown):
        yield failed(Check.KUBELET_DIRECTORY, directory.reason, "Run this as root on the node.")
    else:
        yield _directory(directory, absent, needed=facts.config.device_plugin == "on")
        if directory.exists:
            yield _socket(directory, absent)
    if isinstance(directory, Unknown) or directory.kubelet_listens:  # else its absence is said already
        yield from _ledger(facts)
    yield from _other_plugins(facts)


def _directory(directory: PluginDirectory, absent: Level, *, needed: bool) -> Finding:
    if not directory.exists:
        return Finding(
            Check.KUBELET_DIRECTORY, absent, f"kubelet's directory {directory.path} does not exist", _START
        )
    if needed and not directory.writable:
        return failed(
            Check.KUBELET_DIRECTORY,
            f"this process may not write to {directory.path}, where a device plugin makes its sockets",
            "Run as root, or mount the directory writable into the container.",
        )
    return passed(Check.KUBELET_DIRECTORY, f"{directory.path}" + " is writable" * directory.writable)


def _socket(directory: PluginDirectory, absent: Level) -> Finding:
    if directory.kubelet_listens:
        return passed(Check.KUBELET_RUNS, f"kubelet listens at {directory.path}/kubelet.sock")
    return Finding(Check.KUBELET_RUNS, absent, f"no kubelet listens at {directory.path}/kubelet.sock", _START)


def _ledger(facts: Facts) -> Iterator[Finding]:
    ledger, socket = facts.ledger, f"{facts.config.kubelet_dir}/pod-resources/kubelet.sock"
    if isinstance(ledger, Unknown):
        yield failed(
            Check.POD_RESOURCES,
            ledger.reason,
            "See kubelet's log (journalctl -u kubelet); in a pod the mount of its directory pod-resources.",
        )
    elif ledger.kubelet is None:
        yield failed(
            Check.POD_RESOURCES,
            f"no kubelet answers at {socket}",
            "See that --kubelet-dir is kubelet's --root-dir (its command line, or `ps`); in a pod mount the directory "
            "pod-resources there.",
        )
    elif facts.resources and ledger.healthy is None and facts.config.device_plugin == "on":
        yield warned(
            Check.POD_RESOURCES,
            "kubelet says which pod has which device, but not which devices it has as healthy "
            "(GetAllocatableResources): another plugin of the same resource would go unnoticed",
            "Upgrade kubelet to Kubernetes 1.28 or newer, or switch its feature gate "
            "KubeletPodResourcesGetAllocatable on.",
        )
    else:
        yield passed(Check.POD_RESOURCES, f"kubelet answers at {socket}")
    if not isinstance(ledger, Unknown) and ledger.file is not None and ledger.file.damaged:
        yield warned(Check.POD_RESOURCES, ledger.file.damaged, "Check the disk of kubelet's directory.")


def _other_plugins(facts: Facts) -> Iterator[Finding]:
    """Check for other plugins of our resources. With a daemon `daemon.py` compares the lists; without one any healthy
    device is another plugin's."""
    ledger, directory = facts.ledger, facts.directory
    if isinstance(ledger, Unknown) or ledger.healthy is None or isinstance(directory, Unknown):
        return
    beside = f"; other sockets there: {', '.join(first_of(directory.others))}" if directory.others else ""
    if not isinstance(facts.daemon, NoDaemon) and facts.daemon is not None:
        if isinstance(facts.daemon, Running):
            yield from _named(directory)
        return
    listed = {resource: ids for resource, ids in sorted(ledger.healthy.items()) if ids}
    for resource, ids in listed.items():
        named = ", ".join(quoted_ids(ids))
        kubelet_has = f"kubelet has {len(ids)} healthy devices of {quoted_name(resource)} ({named})"
        if directory.ours:
            yield warned(
                Check.OTHER_PLUGINS,
                f"{kubelet_has}, and a gpuactors with another state directory serves ({', '.join(directory.ours)})",
                "Name its --state-dir, to see what it offers; there is to be one gpuactors on a node.",
            )
        else:
            yield failed(
                Check.OTHER_PLUGINS,
                f"{kubelet_has}, and no gpuactors listens: another plugin serves the same resource{beside}",
                sentence(SWITCH_OFF),
            )
    if not listed:
        yield passed(Check.OTHER_PLUGINS, f"no other plugin serves a resource of gpuactors{beside}")


def _named(directory: PluginDirectory) -> Iterator[Finding]:
    if directory.others:
        names = ", ".join(first_of(directory.others))
        yield passed(Check.OTHER_PLUGINS, f"other plugins' sockets in kubelet's directory: {names}")
