"""Plays the events of a soak on the real node. Each returns what was done, or why there was nothing to do.

A card is pulled out or unbound only when every pod is at rest: otherwise the scheduler may have just given it away,
and the pod would wait for a card that does not come back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, final

from tests.node import domains, pods
from tests.node.claims import ClaimNode, by_id, daemon_process, from_template, kill, refusals, request
from tests.node.cluster import EVENTS, eventually
from tests.node.daemonset import IMAGE, OTHER_IMAGE
from tests.node.fake_host import A100, H100, H100_RESOURCE, NVIDIA, address
from tests.node.node import NO_PLUGIN_S, Node
from tests.node.rules import Look
from tests.soak import events
from tests.soak.events import Event
from tests.soak.tenants import FAILED, GONE, RUNS, STARTS, WAITS, Tenant
from tests.support.patience import patient

H: Final = H100_RESOURCE


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU of the host."""

    slot: int
    model: str
    driver: str
    """That it is on while nobody has it."""

    @property
    def name(self) -> str:
        """The PCI address."""
        return address(self.slot)


CARDS: Final = (
    *(Card(0x21 + number, H100, "vfio-pci") for number in range(4)),
    *(Card(0x31 + number, A100, NVIDIA) for number in range(3)),
    Card(0x34, A100, "vfio-pci"),
)
"""The device plugin offers those on vfio, claims can have each."""

TEMPLATES: Final = {events.CLAIM: A100, events.CROSSING: H100}
"""The model that claims of a kind ask for."""

OUTCOME_S: Final = 120.0 + patient(30.0)
"""Until a pod runs, is refused, or waits for what is not there. Kubelet tries a prepare again after 60 to 90 s."""

PULLED_S: Final = 60.0
"""From the request to remove a card until its pod is gone: a device of a pod that kubelet may not give."""

LATE: Final = ("pods ask for ", "kubelet would give ", "is more than a new pod could have")
"""What is seen while kubelet has not asked yet for what the scheduler has given to a pod."""

LATE_S: Final = 100.0 + patient(5.0)
"""After a restart of the API server: kubelet lists pods again after a growing pause (client-go's reflector), seen 45 s.
After a refused prepare: it asks again after 60 to 90 s."""

UNPUBLISHED_S: Final = 25.0
"""From the return of the API server to the daemon's next try to write its slices: after an outage of 15 s it waits for
up to 10 s (API_BACKOFF_S)."""

COVERED_S: Final = 240.0 + patient(60.0)
"""The outcome of a workload of a compute domain: its domain may have to wait until that before has let the node go."""


@final
class Player:
    """The node, the pods that are there, and what each event does."""

    def __init__(self, node: Node, claims: ClaimNode) -> None:
        self.node = node
        self.claims = claims
        self.api = node.api
        self.tenants: dict[str, Tenant] = {}
        """All that were made."""
        self._domain = ""
        self._excused: dict[str, float] = {}
        self._no_plugin_s = 0.0
        self._late_until = 0.0
        """Until then a restart of the API server may delay what controllers and kubelet do."""
        self._refused: set[str] = set()
        """The claims that the API server has refused to kubelet itself, by its events."""
        self.waited_for = ""
        """What the pods were last not at rest for."""

    # --- events -------------------------------------------------------------------------------------------------------

    def play(self, event: Event) -> str:
        """Plays one: what was done, in words; empty: there was nothing to do."""
        match event.kind:
            case events.PLUGIN | events.CLAIM | events.CROSSING | events.CHANNEL:
                return self._make(event)
            case "end" | "force away":
                return self._end(self.tenants[event.name], grace_s=0 if event.kind == "force away" else 1)
            case "domain":
                self._domain = event.name
                return f"domain {domains.create_domain(self.api, event.name)}"
            case "end domain":
                domains.delete_domain(self.api, event.name)
                return "deleted"
            case "unbind" | "bind" | "pull out" | "plug in":
                return self._card(event.kind, CARDS[event.number])
            case "pull out under a pod":
                return self._pull_out_under_a_pod(event.number)
            case "restart kubelet" | "kubelet away":
                return self._away("kubelet", event.number)
            case "API server away":
                return self._away("api", event.number)
            case "update the daemon":
                return self._update()
            case "kill the daemon":
                return self._kill()
        raise AssertionError(f"nobody plays {event}")

    def _make(self, event: Event) -> str:
        if event.kind == events.CROSSING:
            self.at_rest()
        match event.kind:
            case events.PLUGIN:
                pod = pods.tenant(event.name, {H: event.number})
            case events.CHANNEL:
                uid = self.api.get(f"{domains.DOMAINS}/{self._domain}")["metadata"]["uid"]
                pod = domains.workload(
                    event.name, self._domain, uid, dies_after_s=0, grace_s=1, resources=None
                )
            case _:
                entry = from_template(f"{event.kind}-{event.number}")
                pod = pods.tenant(event.name, claims=[entry])
        pods.create(self.api, pod)
        tenant = Tenant(event.name, event.kind, event.number, time.monotonic())
        self.tenants[event.name] = tenant
        if event.kind == events.CROSSING:
            self.at_rest()
            if tenant.state == WAITS:  # it would race with the pods of the next rounds
                return "waits for a card; " + self._end(tenant)
        return "made"

    def _end(self, tenant: Tenant, *, grace_s: int = 1) -> str:
        was = tenant.state
        tenant.is_over = True
        pods.delete(self.api, tenant.name, grace_s=grace_s)
        return f"deleted, was: {was}"

    def _card(self, kind: str, card: Card) -> str:
        self.at_rest()
        drivers = self.node.host.drivers()
        driver = drivers.get(card.name)
        if kind == "plug in" and card.name not in drivers:
            self._plug(card)
        elif kind == "bind" and card.name in drivers and driver is None:
            self.node.host.bind(card.name, card.driver)
        elif kind == "unbind" and driver is not None and self._is_free(card):
            self.node.host.unbind(card.name)
        elif kind == "pull out" and card.name in drivers and self._is_free(card):
            self.node.host.unplug(card.name)
        else:
            return ""
        return card.name

    def _plug(self, card: Card) -> None:
        self.node.host.plug(card.slot, card.model, driver=card.driver)

    def plug_all(self) -> None:
        """All cards of the host."""
        for card in CARDS:
            self._plug(card)

    def _is_free(self, card: Card) -> bool:
        look = self.node.books.look()
        taken = {device for pairs in (look.allocated or {}).values() for _, device in pairs}
        taken |= {device for _, device in look.claimed}
        return card.name not in taken and not self.node.host.owners().get(card.slot)

    def _pull_out_under_a_pod(self, number: int) -> str:
        """The kernel asks the holder for the card; here its pod is deleted. The card is plugged in again."""
        self.at_rest()
        owners = self.node.host.owners()
        used = [card for card in CARDS if owners.get(card.slot)]
        if not used:
            return ""
        card = used[number % len(used)]
        uids = {who.removeprefix("pod ") for who in owners[card.slot]}
        (tenant,) = (
            one for one in self.running()
            if (pods.get(self.api, one.name) or {}).get("metadata", {}).get("uid") in uids
        )  # fmt: skip
        # It is Unhealthy until its pod is gone, and so lacks in the free count: that pod has no GPU any more.
        for words in (f"{card.name} of a pod is not in kubelet's list", f"free {H} is "):
            self.excuse(words, PULLED_S)
        self._excuse_late()  # a claim that waits may be given this card and another one: kubelet asks again later
        self.node.host.unplug(card.name)
        self._end(tenant)
        pods.wait_phase(self.api, tenant.name, "gone", OUTCOME_S)

        def is_gone() -> bool:
            self.node.host.wake()  # the unplug waits for the pod's processes
            return card.name not in self.node.host.drivers()

        eventually(is_gone, f"the end of {card.name}")
        self._plug(card)
        return f"{card.name} of {tenant.name}"

    def _away(self, component: str, seconds: int) -> str:
        if component == "kubelet":
            self._excuse_no_plugin()
        else:
            self._late_until = time.monotonic() + seconds + LATE_S
            self._excuse_late()
            self.excuse(" of a pod is offered to claims", UNPUBLISHED_S)
        with self.node.without(component):
            time.sleep(seconds)
        return f"{component} was away for {seconds} s"

    def _update(self) -> str:
        self._excuse_no_plugin()
        (container,) = self.node.daemon().pod["spec"]["containers"]
        image = IMAGE if container["image"] == OTHER_IMAGE else OTHER_IMAGE
        self.node.update(image)
        return image

    def _kill(self) -> str:
        self._excuse_no_plugin()
        before = self.node.daemon()
        process = daemon_process(before.uid)
        kill(before)
        self.claims.restarted(before)
        return f"process {process}"

    # --- what must come of it -----------------------------------------------------------------------------------------

    def excuse(self, words: str, most_s: float) -> None:
        """As `Node.excuse`; several in one round add up."""
        self._excused[words] = self._excused.get(words, 0.0) + most_s
        self.node.excuse(words, self._excused[words])

    def _excuse_late(self) -> None:
        for words in LATE:
            self.excuse(words, LATE_S)

    def _excuse_refused(self) -> None:
        """Kubelet was refused a claim that the API server's node authorizer did not know yet: it asks again later, and
        only then the daemon hears of the claim."""
        refused = set(refusals(self.api.items(EVENTS)))
        if refused - self._refused:
            self._excuse_late()
        self._refused |= refused

    def _excuse_no_plugin(self) -> None:
        self._no_plugin_s += NO_PLUGIN_S
        self.node.excuse_no_plugin(self._no_plugin_s)

    def running(self) -> list[Tenant]:
        """The pods that run, by their last look."""
        return [one for one in self.tenants.values() if one.state == RUNS and not one.is_over]

    def at_rest(self) -> None:
        """Waits until each pod runs, was refused, or waits for what is not there, and those that were deleted are
        gone. Raises LateError."""
        mine = [one for one in self.tenants.values() if not one.is_over or one.state != GONE]
        is_covered = any(one.kind == events.CHANNEL and one.state == STARTS for one in mine)

        def look() -> bool:
            try:
                return self._are_at_rest(mine)
            except AssertionError as error:
                self.waited_for = str(error)
                raise

        eventually(look, "rest of all pods", COVERED_S if is_covered else OUTCOME_S, 0.2)

    def _are_at_rest(self, mine: Sequence[Tenant]) -> bool:
        there = {pod["metadata"]["name"]: pod for pod in pods.all_tenants(self.api)}
        for one in mine:
            one.look(there.get(one.name), time.monotonic())
        look = self.node.books.look()
        for one in mine:
            if one.is_over:
                assert one.state == GONE, f"{one.name} is to end: {pods.told(there.get(one.name))}"
                continue
            assert one.state not in (STARTS, GONE), f"{one.name}: {pods.told(there.get(one.name))}"
            if one.state == WAITS:
                assert self._lacks(one, look), f"{one.name} waits, and nothing is lacking: {one.said}"
        return True

    def _lacks(self, tenant: Tenant, look: Look) -> bool:
        """What a waiting pod asks for is not there."""
        if tenant.kind == events.PLUGIN:
            return look.allocatable.get(H, 0) - look.requests.get(H, 0) < tenant.asked
        if tenant.kind == events.CHANNEL:
            return not self._domain
        model = TEMPLATES[tenant.kind]
        taken = {device for _, device in look.claimed}
        free = [card for card in CARDS if card.model == model and card.name in look.offered - taken]
        return len(free) < tenant.asked

    def check(self) -> None:
        """After a round: pods at rest, books true, slices consistent, each pod has its own cards open, and nothing was
        broken since the round before. Raises AssertionError, LateError."""
        self.at_rest()
        self.node.settled(within_s=patient(60.0))
        self.claims.consistent()
        eventually(self._have_own_cards, "each pod to have its own cards open")
        self._excuse_refused()
        self.node.check_always()
        there = [one for one in self.tenants.values() if not one.is_over]
        failed = [f"{one.name}: {one.said}" for one in there if one.state == FAILED]
        assert not failed, failed
        self.node.forget()
        self._excused.clear()
        self._no_plugin_s = 0.0
        if time.monotonic() < self._late_until:  # also claims of ended pods are deleted that much later
            self._excuse_late()

    def _have_own_cards(self) -> bool:
        open_by: dict[str, int] = {}
        for who in self.node.host.owners().values():
            for one in who:
                open_by[one] = open_by.get(one, 0) + 1
        for tenant in self.running():
            pod = pods.get(self.api, tenant.name) or {}
            have = open_by.get(f"pod {pod.get('metadata', {}).get('uid')}", 0)
            assert have == tenant.asked, f"{tenant.name} has {have} cards open, and asked for {tenant.asked}"
        return True

    def clear(self) -> None:
        """All pods end, and nothing of them is left. Raises LateError."""
        for one in self.tenants.values():
            if not one.is_over:
                self._end(one)
        self.at_rest()
        self._end_domains()
        there = self.node.host.drivers()
        self.claims.nothing_is_left(
            {card.name: card.driver for card in CARDS if there.get(card.name) is not None}
        )
        self.node.settled(within_s=patient(60.0))

    def _end_domains(self) -> None:
        """NVIDIA's controller takes the label from the node, and the daemons end."""
        for one in self.api.items(domains.ALL_DOMAINS) if self._domain else ():
            domains.delete_domain(self.api, one["metadata"]["name"])
        eventually(
            lambda: not self.api.items(domains.DAEMON_PODS), "the end of the domains' daemons", COVERED_S
        )

    def abandon(self) -> None:
        """After a failure: ends what can be ended while gpuactors is there, which unprepares its claims."""
        with suppress(Exception):  # the failure itself is told
            pods.clear(self.api)
            self._end_domains()


@contextmanager
def playing(node: Node, claims: ClaimNode) -> Iterator[Player]:
    """The player of a node with gpuactors and all cards."""
    for kind, model in TEMPLATES.items():
        for count in (1, 2):
            claims.template(f"{kind}-{count}", request(selector=by_id(model), count=count))
    found = Player(node, claims)
    found.plug_all()
    claims.offered(*(card.name for card in CARDS))
    node.settled()
    node.forget()
    try:
        yield found
    except BaseException:
        found.abandon()
        raise


__all__ = ["CARDS", "Player", "playing"]
