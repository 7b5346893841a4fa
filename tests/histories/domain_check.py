"""The conditions on compute domains, after every step and at the end: by a naive reading of kubelet, of the API server,
and of the daemons' orders about the node's label. Only on a node with compute domains (`World.domains`)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Final, final

import trio

from gpuactors import limits
from gpuactors.core.domains.outputs import LabelPatchWanted
from gpuactors.core.events.claims import ClaimRead, PrepareAsked, UnprepareAsked
from gpuactors.core.events.deviceplugin import CallAbandoned
from gpuactors.core.events.domains import LabelRead
from gpuactors.core.state.claims import domain_of
from gpuactors.core.values.claim import Claim, ClaimsOf
from gpuactors.core.values.claim_states import OWNING
from gpuactors.core.values.domain import LabelChange, NodeLabel
from gpuactors.core.values.effects import Reply
from gpuactors.core.values.model import Token
from gpuactors.ports.node import Step
from gpuactors_simulation.kube.domain_objects import DAEMON, label_in
from gpuactors_simulation.kube.status import NODES
from gpuactors_simulation.kubelet.dra.values import ClaimInfo
from gpuactors_simulation.kubelet.values import Phase, Pod
from tests.histories.domain_events import is_strangers
from tests.histories.domains import DomainsNode
from tests.histories.dra_check import Problem
from tests.histories.world import World, states_of

ANSWER_WITHIN_S: Final = limits.CLAIM_ANSWER_S + 2.0
"""A call is answered in its time, whatever it waits for; kubelet gives up at 45 s."""

COLLECTED_AFTER_S: Final = limits.CLAIM_COLLECT_S
"""A claim that is gone at the API server, with its pod, is not given up before."""

LIVE: Final = "the label goes under a live claim"
FOLLOWER: Final = "the label goes under a claim that waits"
FOREIGN: Final = "a label of somebody else is removed"


@final
class DomainRules:
    """Implements `dra_check.Rules`."""

    def __init__(self, world: World, node: DomainsNode) -> None:
        self._world = world
        self._node = node
        self._labels = _Labels(world, node)
        self._version = node.api.store.version
        self._label = node.label
        self._set_by_others = False
        """Somebody else gave the label its value."""
        self._calls = 0
        self._jumps = 0
        self._jumped_at = -math.inf

    @property
    def node(self) -> DomainsNode:
        """Implement `Rules.node`."""
        return self._node

    def stepped(self, daemon: str, step: Step) -> None:
        """Implement `Rules.stepped`."""
        self._labels.stepped(daemon, step)

    def problem(self) -> Problem | None:
        """Implement `Rules.problem`."""
        self._labels.inspect()
        if self._labels.problems:
            return self._labels.problems[0]
        return self._two_owners() or self._unready() or self._overwritten() or self._late()

    # --- at every moment ------------------------------------------------------------------------------------

    def _two_owners(self) -> Problem | None:
        world, node = self._world, self._node
        for state in states_of(d for d in world.daemons if d.is_serving):
            entries = [e for e in state.domains.claims.entries.values() if e.state in OWNING]
            owners = Counter(
                str(d) for e in entries if (own := domain_of(e).domain) is not None for d in own.devices
            )
            if doubles := sorted(device for device, number in owners.items() if number > 1):
                return "two owners", f"two claims have {doubles[0]}"
        live = [info for info in world.kubelet.view.dra.claims if info.prepared and not info.unpreparing]
        devices = Counter(device for info in live for device in node.devices_of(info.uid))
        if doubles := sorted(device for device, number in devices.items() if number > 1):
            return "two owners", f"kubelet has two claims prepared with {doubles[0]}"
        domains = {node.made[info.uid].domain for info in live if info.uid in node.made}
        if len(domains) > 1:
            return "two domains", f"kubelet has claims of {sorted(domains)} prepared"
        return None

    def _unready(self) -> Problem | None:
        for info in self._world.kubelet.view.dra.claims:
            claim = self._node.made.get(info.uid)
            if claim is not None and info.prepared and claim.domain not in self._node.controller.was_ready:
                return "prepared before its domain was ready", str(info)
        return None

    def _overwritten(self) -> Problem | None:
        """A daemon adds the label where there is none and removes it; only somebody else gives it another value."""
        changes = [c for c in self._node.api.store.since(self._version) if c.kind is NODES]
        self._version = self._node.api.store.version
        for change in changes:
            before, self._label = self._label, label_in(change.object)
            is_daemons = change.version not in self._node.edits
            if before != self._label:
                self._set_by_others = not is_daemons
            if is_daemons and None not in (before, self._label) and before != self._label:
                return "a label was overwritten", f"{before} by {self._label}"
        return None

    def _late(self) -> Problem | None:
        world = self._world
        if world.counts["the clock jumps"] != self._jumps:
            self._jumps, self._jumped_at = world.counts["the clock jumps"], trio.current_time()
        calls, self._calls = world.kubelet.dra_calls[self._calls :], len(world.kubelet.dra_calls)
        for call in calls:
            took_s = call.ended_at - call.began_at
            if took_s > ANSWER_WITHIN_S and call.began_at > self._jumped_at:
                return "a call was answered late", f"{call.call} of {call.claims} after {took_s:.1f} s"
        return None

    # --- at rest --------------------------------------------------------------------------------------------

    def end_faults(self) -> None:
        """Implement `Rules.end_faults`: whoever has set a label removes it, also one that a container needs: a daemon
        that knows the container's claim adds it again, and one that does not never removes it."""
        self._node.end_faults()
        running = {self._node.uids.get(pod.name) for pod in self._world.kubelet.containers}
        needed = {self._node.made[uid].domain for uid in running if uid is not None}
        if self._node.label is not None and (self._set_by_others or self._node.label not in needed):
            self._node.set_label(None)

    def should_run(self, pod: Pod) -> bool:
        """Implement `Rules.should_run`."""
        if pod.phase not in (Phase.PENDING, Phase.ADMITTING, Phase.STARTING):
            return pod.phase is Phase.TERMINATING
        if pod.name in self._node.controller.pods:
            return False  # it is started for the pods of channels, which wait for it
        uid = self._node.claims.get(pod.name)
        if uid is None or self._node.made[uid].domain not in self._node.domains.values():
            return False
        others = {info.uid for info in self._world.kubelet.view.dra.claims} & self._node.made.keys()
        # Kubelet may have lost a claim whose container runs.
        others |= {
            self._node.uids[p.name] for p in self._world.kubelet.containers if p.name in self._node.uids
        }
        # What a claim has that is not in the checkpoint, nor at the API server any more, nobody knows.
        return others.isdisjoint(self._node.unknowable) and not any(
            self._excludes(uid, o) for o in others - {uid}
        )

    def _excludes(self, uid: str, other: str) -> bool:
        made = self._node.made
        shares = not set(self._node.devices_of(uid)).isdisjoint(self._node.devices_of(other))
        return shares or made[uid].domain != made[other].domain

    def unsettled(self) -> list[str]:
        """Implement `Rules.unsettled`: the label is there exactly while a claim of its domain has a channel. The label
        of a domain that was deleted is not put back."""
        infos = [i for i in self._world.kubelet.view.dra.claims if i.uid in self._node.made]
        unknown = self._node.unknowable
        owners = {self._node.made[i.uid].domain for i in infos if i.prepared and i.uid not in unknown}
        for state in states_of(d for d in self._world.daemons if d.is_serving):
            entries = (e for e in state.domains.claims.entries.values() if e.state in OWNING)
            owners |= {
                str(own.uid)
                for e in entries
                if (own := domain_of(e).domain) is not None and e.name.uid in self._node.made
            }
        waiting = {self._node.made[info.uid].domain for info in infos}
        label = self._node.label
        if owners and label not in owners and (label is not None or owners & self._node.live_domains):
            return [f"the label is {label}, and claims of {sorted(owners)} have channels"]
        if not owners and label is not None and label not in waiting:
            return [f"the label is {label}, and no claim has a channel"]
        return []

    def left(self) -> list[str]:
        """Implement `Rules.left`."""
        node, left = self._node, []
        for state in states_of(d for d in self._world.daemons if d.is_serving):
            left += [
                f"the claim {e.name} is {e.state} ({e.problem})"
                for e in state.domains.claims.entries.values()
                if e.state in OWNING
            ]
        content = node.disk.files.get(node.checkpoint, b"")
        if node.boot_id.encode() in content:  # else it is of another boot, and counts for nothing
            left += [f"the checkpoint has {uid}" for uid in json.loads(content)["checkpoint"]["claims"]]
        directories = (name for name in node.directories() if name not in node.forgotten)
        left += [f"the directory of the domain {name}" for name in directories]
        if node.label is not None:
            left.append(f"the label {node.label}")
        return left + _not_offered(node)


@final
class _Labels:
    """Watches what each daemon orders about the node's label; each order that is wrong is in `problems`."""

    def __init__(self, world: World, node: DomainsNode) -> None:
        self._world = world
        self._node = node
        self._asked: dict[tuple[str, Token], str] = {}
        """The prepares that wait: the claim's UID by daemon and call."""
        self._read: set[tuple[str, str]] = set()
        """The claims that a daemon has read since their prepare came: by daemon and UID."""
        self._stale: dict[str, str | None] = {}
        """The value that each daemon has found when it began to serve, while no container had a channel of a claim that
        it can know: for all it knows, the value is that of a claim that it found by its files."""
        self._patches: dict[str, int] = {}
        self._gone: dict[str, float] = {}
        """Since when a claim and its pod are gone, by UID."""
        self.problems: list[Problem] = []

    def inspect(self) -> None:
        """Something has happened."""
        pods = {uid for pod in self._world.kubelet.view.pods.values() for uid in (pod.uid,)}
        there = set(self._node.claims.values())
        for info in self._world.kubelet.view.dra.claims:
            if info.uid not in there and pods.isdisjoint(info.pods):
                self._gone.setdefault(info.uid, trio.current_time())

    def stepped(self, daemon: str, step: Step) -> None:
        """A daemon's core took an event."""
        self.inspect()
        match step.event:
            case PrepareAsked(token, claim, ClaimsOf.DOMAINS):
                self._asked[daemon, token] = claim.uid
                self._read.discard((daemon, claim.uid))
            case UnprepareAsked(_, claim, ClaimsOf.DOMAINS):
                self._asked = {key: uid for key, uid in self._asked.items() if uid != claim.uid}
            case CallAbandoned(token):
                self._asked.pop((daemon, token), None)
            case ClaimRead(_, Claim() as claim, ClaimsOf.DOMAINS):
                self._read.add((daemon, claim.name.uid))
            case LabelRead(_, NodeLabel() as found) if not step.before.domains.label.is_read:
                live = {info.uid for info in self._live()}
                self._stale[daemon] = found.value if live <= self._node.unknowable else None
            case _:
                pass
        for effect in step.effects:
            if isinstance(effect, Reply):
                self._asked.pop((daemon, effect.token), None)
        wanted = step.outputs.domains if step.outputs is not None else None
        order = wanted.label_patch if wanted is not None else None
        if order is not None and order.number != self._patches.get(daemon):
            self._patches[daemon] = order.number
            self._ordered(daemon, order)

    def _ordered(self, daemon: str, order: LabelPatchWanted) -> None:
        if order.patch.change is not LabelChange.REMOVE:
            return
        value, made = str(order.patch.value), self._node.made
        for info in self._live():
            if made[info.uid].domain == value:
                self.problems.append((LIVE, f"{daemon} removes {value}, and a container of {info} runs"))
        for (asked, _), uid in self._asked.items():
            if asked == daemon and (daemon, uid) in self._read and uid in made and made[uid].domain == value:
                self.problems.append((FOLLOWER, f"{daemon} removes {value}, and the prepare of {uid} waits"))
        if is_strangers(value) and self._stale.get(daemon) != value:
            self.problems.append((FOREIGN, f"{daemon} removes {value}"))

    def _live(self) -> Iterator[ClaimInfo]:
        """The claims with a channel of the containers that run, but those that may have been given up."""
        running = {pod.uid for pod in self._world.kubelet.containers}
        for info in self._world.kubelet.view.dra.claims:
            if info.uid not in self._node.made or not info.devices or info.unpreparing:
                continue
            gone_s = trio.current_time() - self._gone.get(info.uid, math.inf)
            if gone_s < COLLECTED_AFTER_S and not running.isdisjoint(info.pods):
                yield info


def _not_offered(node: DomainsNode) -> list[str]:
    """At rest every channel and the daemon are offered, once, without a taint."""
    devices = node.offered()
    names, wanted = sorted(d["name"] for d in devices), sorted((*node.channel_names(), DAEMON))
    found = [] if names == wanted else [f"the slices offer {names}, not {wanted}"]
    return found + [f"{d['name']} has the taints {d['taints']}" for d in devices if d.get("taints")]
