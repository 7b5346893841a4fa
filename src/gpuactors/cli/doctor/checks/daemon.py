"""The running daemon: that it serves, that kubelet has its lists, and that it sees what this command sees."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from gpuactors.cli.doctor.facts import Facts, NoDaemon, Unknown, offers_gpus, wants_claims
from gpuactors.cli.doctor.finding import Check, Finding, failed, passed, sentence, warned
from gpuactors.control.client import Running
from gpuactors.control.view import NodeView, ResourceView
from gpuactors.core.deviceplugin.listing import SWITCH_OFF, comparable, difference
from gpuactors.core.reports.readiness import OFFERS_NOTHING
from gpuactors.core.values.model import Health, ResourceName, Role
from gpuactors.core.values.quote import first_of, quoted_name
from gpuactors.ports.node import LedgerContents

_LOG = "See the daemon's log (kubectl -n gpuactors logs POD, or journalctl -u gpuactors)"


def check(facts: Facts) -> Iterator[Finding]:
    """Check the daemon; nothing before installation."""
    match facts.daemon:
        case None:
            return
        case NoDaemon(reason):
            yield failed(
                Check.DAEMON_RUNS,
                reason,
                "Start it, or name its --state-dir. kubectl -n gpuactors get pods -o wide --field-selector "
                f"spec.nodeName={facts.node} shows its pod. Before installation: gpuactors doctor --pre.",
            )
        case Unknown(reason):
            yield failed(
                Check.DAEMON_RUNS, reason, f"{_LOG}; if it hangs, end it: its supervisor starts it again."
            )
        case running:
            yield _serves(running)
            if not (offers_gpus(facts.config) or wants_claims(facts.config)):
                yield failed(
                    Check.DAEMON_RUNS, OFFERS_NOTHING, "Compare `gpuactors config show` with what was meant."
                )
            yield from _resources(running, facts.ledger)
            yield from _sees(running, facts)


def is_unsettled(running: Running, ledger: LedgerContents | Unknown) -> bool:
    """Return whether all may be well a moment later: a daemon that has just started has no ledger and registers, and
    during each change of a list kubelet has other healthy devices than the daemon."""
    view = running.view
    if view.role != Role.SERVING or view.kubelet_problem or view.ledger_problem:
        return True
    return any(
        not r.problem
        if not r.registered
        else not isinstance(ledger, Unknown) and _difference(view, r, ledger)
        for r in view.resources
    )


def _difference(view: NodeView, resource: ResourceView, ledger: LedgerContents) -> str:
    """Compare kubelet's healthy devices with the daemon's; empty also if kubelet does not list its own."""
    if ledger.healthy is None:
        return ""
    daemon_ids = (
        d.id for d in view.devices if d.resource == resource.name and d.listed and d.health == Health.HEALTHY
    )
    return difference(comparable(daemon_ids), ledger.healthy.get(ResourceName(resource.name), ()))


def _serves(running: Running) -> Finding:
    named = f"process {running.pid}, version {running.version}"
    if running.view.role == Role.SERVING:
        return passed(Check.DAEMON_RUNS, f"the daemon serves ({named})")
    return warned(
        Check.DAEMON_RUNS,
        f"the daemon ({named}) does not serve kubelet: {running.view.role}",
        f"Nothing, if an update is under way. {_LOG}.",
    )


def _resources(running: Running, ledger: LedgerContents | Unknown) -> Iterator[Finding]:
    for resource in running.view.resources:
        name = quoted_name(resource.name)
        counts = (
            f"{name}: {resource.listed} listed, {resource.healthy} Healthy, {resource.allocated} allocated, "
            f"{resource.free} free"
        )
        if not resource.registered:
            problem = resource.problem or "it is being registered"
            yield failed(
                Check.REGISTERED,
                f"{name} is not registered with kubelet: {problem}",
                f"See that kubelet runs, and that no other plugin serves this resource. {_LOG}.",
            )
        elif resource.problem:
            yield failed(Check.REGISTERED, f"{name}: {resource.problem}", sentence(SWITCH_OFF))
        elif isinstance(ledger, LedgerContents) and (differs := _difference(running.view, resource, ledger)):
            yield failed(
                Check.KUBELET_LIST,
                f"{name}: {differs}",
                f"The daemon registers again by itself within a minute. If it stays so, {SWITCH_OFF}.",
            )
        elif resource.free < 0:
            yield warned(
                Check.FREE_COUNT,
                f"{counts}: the scheduler places no pod of it here until pods with lost GPUs have ended",
                f"Delete the pods whose GPU is not Healthy any more: {_lost(running.view, resource)}.",
            )
        elif isinstance(ledger, Unknown) or ledger.healthy is None:
            yield passed(Check.REGISTERED, f"{counts}; registered with kubelet")
        else:
            yield passed(Check.KUBELET_LIST, f"{counts}; kubelet has the same list")


def _lost(view: NodeView, resource: ResourceView) -> str:
    """Return the commands that delete the pods with a GPU of this resource that is not Healthy."""
    lost = {d.address for d in view.devices if d.resource == resource.name and d.health != Health.HEALTHY}
    pods = [pod.name.split("/", 1) for pod in view.pods if pod.name and not lost.isdisjoint(pod.devices)]
    commands = [f"kubectl -n {quote(namespace)} delete pod {quote(name)}" for namespace, name in pods]
    return "; ".join(first_of(commands)) or "gpuactors inspect -o wide names them"


def _sees(running: Running, facts: Facts) -> Iterator[Finding]:
    view = running.view
    problems = (
        (
            "kubelet",
            view.kubelet_problem,
            "Start kubelet; in a pod see the mount of its directory device-plugins.",
        ),
        (
            "kubelet's ledger",
            view.ledger_problem,
            "See that kubelet runs; in a pod the mount of pod-resources.",
        ),
        (
            "uevents",
            view.uevents_problem,
            "In a pod remove hostUsers: false. Until then a change waits for a scan.",
        ),
        (
            "the configuration file",
            view.config_problem,
            "Correct the file, or restart the daemon, as the reason says.",
        ),
    )
    findings = [warned(Check.DAEMON_SEES, f"{what}: {why}", remedy) for what, why, remedy in problems if why]
    if changed := _seen_otherwise(view, facts):
        findings.append(
            warned(
                Check.DAEMON_SEES,
                f"the daemon knows another driver, or none, of {', '.join(first_of(changed))}, or has another --select",
                f"Compare `gpuactors inspect` with `lspci -Dnnk -s {changed[0]}`. A change of this moment is seen at "
                "once; a uevent that was lost is made good by the next scan (resync_interval_s).",
            )
        )
    and_gpus = "" if isinstance(facts.devices, Unknown) else ", and sees each GPU as this command does"
    what = f"it receives uevents, kubelet and its ledger{and_gpus}"
    yield from findings or [passed(Check.DAEMON_SEES, what)]


def _seen_otherwise(view: NodeView, facts: Facts) -> list[str]:
    """Return the GPUs whose driver is another one, or none, for the daemon than for this command."""
    if isinstance(facts.devices, Unknown):
        return []
    by_daemon = {d.address: d.driver for d in view.devices if d.present}
    by_command = {d.address: d.driver for d in facts.devices.view.devices if d.present}
    return sorted(
        a for a in by_daemon.keys() | by_command.keys() if by_daemon.get(a, "") != by_command.get(a, "")
    )
