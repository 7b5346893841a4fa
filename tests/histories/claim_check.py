"""The conditions on claims of GPUs, after every step and at the end: by a naive reading of the node, of kubelet and of
the API server. Only on a node with claims of GPUs (`World.claims`)."""

from __future__ import annotations

import json
from collections import Counter
from typing import Final, final

from gpuactors.core.kinds.table import slice_name
from gpuactors.core.state.claims import gpus_of
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim_states import OWNING
from gpuactors.core.values.effects import Log
from gpuactors.core.values.model import DeviceKey
from gpuactors.ports.node import Step
from gpuactors_simulation.host.kernel import NVIDIA
from gpuactors_simulation.kubelet.dra.values import ClaimInfo
from gpuactors_simulation.kubelet.values import Phase, Pod
from tests.histories.administrator import Administrator
from tests.histories.answer_check import ClaimAnswers
from tests.histories.claim_events import CLAIM_POD
from tests.histories.claims import DRIVER, ClaimsNode
from tests.histories.dra_check import Problem
from tests.histories.dra_node import CDI_DIR
from tests.histories.truth import card_of_part, given_by_us, is_any_withheld, others_cards
from tests.histories.world import World, states_of

LIVE: Final = "a live claim lost its card"
UNDONE: Final = "an administrator's bind was undone"
ASTRAY: Final = "a claim's card was taken for gone"


@final
class ClaimRules:
    """Implements `dra_check.Rules`."""

    def __init__(self, world: World, node: ClaimsNode) -> None:
        self._world = world
        self._node = node
        self._answers = ClaimAnswers(world, node)
        self._astray = ""
        """The first claim whose card was taken for gone, and had not been pulled."""

    @property
    def node(self) -> ClaimsNode:
        """Implement `Rules.node`."""
        return self._node

    def stepped(self, daemon: str, step: Step) -> None:
        """Implement `Rules.stepped`."""
        self._answers.stepped(daemon, step)
        for effect in step.effects:
            # A part goes with its card's driver, or by itself.
            if isinstance(effect, Log) and effect.name == "claim.astray" and not self._world.has_parts:
                is_wrong = (
                    effect.fields["cause"] == Cause.GONE and effect.fields["uid"] not in self._node.moved
                )
                self._astray = self._astray or (str(effect.fields["reason"]) if is_wrong else "")

    def problem(self) -> Problem | None:
        """Implement `Rules.problem`."""
        return (
            self._two_owners()
            or self._live_claim()
            or self._prebound()
            or self._of_the_host()
            or self._undone()
            or ((ASTRAY, self._astray) if self._astray else None)
            or self._answers.problem()
        )

    def _two_owners(self) -> Problem | None:
        world, node = self._world, self._node
        for state in states_of(d for d in world.daemons if d.is_serving):
            owners = Counter(
                gpu.key
                for entry in state.gpus.claims.entries.values()
                if entry.state in OWNING
                for gpu in gpus_of(entry).gpus
            )
            if doubles := sorted(card for card, number in owners.items() if number > 1):
                return "two owners", f"two claims have {doubles[0]}"
        known = world.kubelet.view.dra.claims
        owning = (i for i in known if i.prepared and not i.unpreparing and not self._is_named_nowhere(i))
        live = [card for info in owning for card in node.given[info.uid]]
        pods = {g.card: g.pod for g in given_by_us(world) if g.card is not None}
        for card in live:
            if live.count(card) > 1:
                return "two owners", f"kubelet has two claims prepared with {card}"
            if card in pods:
                return "two owners", f"{card} is of a claim, and of pod {pods[card]} by the device plugin"
        return None

    def _is_named_nowhere(self, info: ClaimInfo) -> bool:
        """The checkpoint is lost, its files went when its card was unbound, and its pod was deleted by force, so that
        kubelet lists it for no pod: nobody can know that it has the card."""
        world, node = self._world, self._node
        is_listed = any(info.name in pod.uses for pod in world.kubelet.view.pods.values())
        has_file = f"{CDI_DIR}/k8s.{DRIVER}-claim_{info.uid}.json" in node.disk.files
        return info.uid in node.forgotten_claims and not has_file and not is_listed

    def _live_claim(self) -> Problem | None:
        """The cards of a pod that runs stay on vfio-pci. An unbind that waits for the pod's process is one already: the
        kernel asks the process to let go (drivers/vfio/vfio_main.c, vfio_unregister_group_dev)."""
        world = self._world
        for pod in world.kubelet.containers:
            for card in self._cards(pod):
                if not world.is_bound(card):
                    return LIVE, f"{card} of pod {pod.name} is not on vfio-pci"
                group = world.group_of(card)
                assert group is not None
                members = world.tree.group_members(group) & world.tree.functions.keys()
                if leaving := sorted(a for a in members if world.tree.is_waiting(a)):
                    return LIVE, f"{leaving[0]}, with {card} of pod {pod.name}, is being unbound"
        return None

    def _cards(self, pod: Pod) -> list[str]:
        """Those of its claims, but for the claims under which a card was pulled or an administrator has changed a
        driver."""
        infos = [i for i in self._world.kubelet.view.dra.claims if i.name in pod.uses and i.prepared]
        infos = [i for i in infos if i.uid not in self._node.moved]
        if (him := self._node.administrator) is not None:
            infos = [i for i in infos if i.uid not in him.disturbed]
        return [card for info in infos if not info.unpreparing for card in self._node.given[info.uid]]

    def _prebound(self) -> Problem | None:
        him = self._node.administrator
        prebound = {card for card, driver in self._node.home.items() if driver == "vfio-pci"}
        if him is not None:
            prebound = {card for card in prebound if not him.has_decided(card)}
        for path, text in self._node.writes.written:
            if path.endswith("/vfio-pci/unbind") and text.strip() in prebound:
                return "a pre-bound card was unbound", text.strip()
        return None

    def _of_the_host(self) -> Problem | None:
        """Nothing is ever written to a function that is in no GPU's slot."""
        ours = {address.rpartition(".")[0] for address in self._node.home}
        for path, text in self._node.writes.written:
            is_drivers = path.endswith(("bind", "drivers_probe"))
            address = text.strip() if is_drivers else path.split("/")[-2]
            if address.rpartition(".")[0] not in ours:
                return "a function of the host was written to", f"{text.strip()!r} to {path}"
        return None

    def _undone(self) -> Problem | None:
        him = self._node.administrator
        return (UNDONE, him.undone[0]) if him is not None and him.undone else None

    # --- at rest --------------------------------------------------------------------------------------------

    def end_faults(self) -> None:
        """Implement `Rules.end_faults`."""
        node = self._node
        node.end_faults()
        node.kernel.forget_plans()
        node.kernel.release()
        self._world.free_groups_of_host()
        self._world.choose_all()
        for name in list(self._world.other_driver.claims):
            self._world.other_driver.unprepare(name)
            if name in self._world.kubelet.view.pods:
                self._world.kubelet.delete(name)
        for address in list(node.users):
            node.end_user(address)
        for address in list(node.pulled):
            self._world.bring_back(address, self._world.new_group())
        if node.administrator is not None:
            node.administrator.repair()
            self._claim_all()

    def _claim_all(self) -> None:
        """A pod with a claim comes for every card that no other claim has: whatever an administrator did before, it
        runs, and the card goes back to where he has left it."""
        world, node = self._world, self._node
        for card in [card for card in node.cards if card not in node.allocated()]:
            world.pods += 1
            name = f"{CLAIM_POD}{world.pods}"
            node.allocate(name, [card])
            world.kubelet.submit(name, {}, uses=(name,))

    def should_run(self, pod: Pod) -> bool:
        """Implement `Rules.should_run`."""
        world, node = self._world, self._node
        if pod.phase not in (Phase.PENDING, Phase.ADMITTING, Phase.STARTING):
            return pod.phase is Phase.TERMINATING
        if pod.name not in node.claims:
            return False
        uid = node.claims[pod.name]
        if uid in node.moved or self._answers.may_have_another_model(uid):
            return False
        if node.administrator is not None and uid in node.administrator.disturbed:
            return False
        cards = node.given[uid]
        if any(map(world.may_be_dead, cards)):
            return False
        others = {c for i in world.kubelet.view.dra.claims if i.uid != uid for c in node.given[i.uid]}
        others |= {g.card for g in given_by_us(world) if g.card is not None} | others_cards(world).keys()
        if is_any_withheld(world):
            return False
        if world.has_vgpus and not all(world.can_be_given(card) for card in cards):
            return False
        if world.has_vgpus and any(not others.isdisjoint(card_of_part(world, card)) for card in cards):
            return False  # neither claim gets what it was given: the scheduler does not know what a part is made of
        groups = {world.group_of(card) for card in (*cards, *self._released_with(uid))}
        held = any(group is not None and world.tree.holder_of(group) is not None for group in groups)
        return not held and others.isdisjoint(cards)

    def _released_with(self, uid: str) -> set[str]:
        """The cards of the claims from which one of this claim's is being released: a claim is released as a whole."""
        serving = states_of(d for d in self._world.daemons if d.is_serving)
        entries = [
            (u, e) for state in serving for u, e in state.gpus.claims.entries.items() if e.state in OWNING
        ]
        owned = [{gpu.key for gpu in gpus_of(e).gpus} for u, e in entries if u != uid]
        return {card for cards in owned if not cards.isdisjoint(self._node.given[uid]) for card in cards}

    def unsettled(self) -> list[str]:
        """Implement `Rules.unsettled`: whether a pod has its cards is a matter of every moment. A container that
        restarts is started with the files that are there, whoever has touched them."""
        node, world = self._node, self._world
        known = world.kubelet.view.dra.claims
        prepared = [i.uid for i in known if i.prepared and not i.unpreparing]
        if wrong := [text for uid in prepared if (text := self._answers.names_others(uid))]:
            return wrong
        if node.administrator is None:
            return _dead_offered(world, node)
        # The files of a claim are removed while one of its cards is off its vfio driver.
        drifted = {uid for uid in prepared if not all(world.is_bound(card) for card in node.given[uid])}
        uids = [uid for uid in prepared if uid not in node.forgotten_claims and uid not in drifted]
        names = (f"k8s.{DRIVER}-claim", f"{DRIVER}-metadata")
        paths = [f"{CDI_DIR}/{name}_{uid}.json" for uid in uids for name in names]
        return [
            f"{path} is not there, or not ours" for path in paths if not _is_cdi(node.disk.files.get(path))
        ]

    def left(self) -> list[str]:
        """Implement `Rules.left`. A driver that an administrator has unloaded holds nothing but the functions that are
        to go back to it; it is loaded when there is nothing else."""
        if self._world.take_parts_away():
            return ["the parts of cards are gone just now"]
        if self._world.dead_places():
            return self._left() or self._enumerated()
        him, left = self._node.administrator, self._left()
        if him is None or not him.is_late:
            return left + self._misplaced() + _not_offered(self._node)
        if not left and not (left := _not_offered(self._node)):
            him.load(NVIDIA)
            return [f"{NVIDIA} has been loaded just now"]
        return left

    def _enumerated(self) -> list[str]:
        """No claim has a card that may be dead: the kernel enumerates it again."""
        for place in self._world.dead_places():
            self._world.enumerate_again(place)
        return ["dead cards have been enumerated again just now"]

    def _left(self) -> list[str]:
        """The traces of claims."""
        world, node, left = self._world, self._node, []
        for state in states_of(d for d in world.daemons if d.is_serving):
            left += [
                f"the claim {e.name} is {e.state} ({e.problem})"
                for e in state.gpus.claims.entries.values()
                if e.state in OWNING
            ]
        content = node.disk.files.get(node.checkpoint, b"")
        if node.administrator is not None and node.administrator.is_late:
            return left  # a return that is owed is in the checkpoint, with the claim for which the card was bound
        if node.boot_id.encode() in content:  # else it is of another boot, and counts for nothing
            # The models of a claim of an earlier boot are kept until kubelet asks for it again: at most 1,024.
            kept = json.dumps({**json.loads(content)["checkpoint"], "earlierModels": None})
            left += [f"the checkpoint has {uid}" for uid in node.given if uid in kept]
        return left

    def _misplaced(self) -> list[str]:
        """Functions that are not where they are to be when no claim has them."""
        world, node, left = self._world, self._node, []
        him = node.administrator
        for address, home in node.home.items():
            driver, override = world.tree.driver_of(address), node.kernel.override(address).strip()
            # An unbind or an override of the daemon before the loss is, for the next one, what it found.
            forgotten = address in node.forgotten
            if him is not None and (him.has_decided(address) or address in him.overrode):
                left += _not_as_decided(him, address, driver, override, forgotten=forgotten)
                continue
            if driver != home and not (forgotten and driver in (None, "vfio-pci")):
                left.append(f"{address} is on {driver}, not on {home}")
            if override and not (forgotten and override == "vfio-pci"):
                left.append(f"the driver_override of {address} is {override!r}")
        return left


def _not_as_decided(
    him: Administrator, address: str, driver: str | None, override: str, *, forgotten: bool
) -> list[str]:
    """A function without a driver may be given back by a probe, which is the kernel's choice: by the override, if he
    has written one, which may name no driver at all."""
    wanted, found = him.at_rest(address), []
    if override and address in him.overrode:
        wanted |= {None, override}
    if None in wanted:
        wanted |= {him.host_driver(address), "vfio-pci"}
    if forgotten:
        wanted |= {None, "vfio-pci"}
    if driver not in wanted:
        found.append(
            f"{address} is on {driver}, and an administrator has left it on {sorted(map(str, wanted))}"
        )
    if override and address not in him.overrode and not (forgotten and override == "vfio-pci"):
        found.append(f"the driver_override of {address} is {override!r}")
    return found


def _is_cdi(content: bytes | None) -> bool:
    try:
        return bool(json.loads(content or b"")["devices"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _dead_offered(world: World, node: ClaimsNode) -> list[str]:
    """A dead card that nobody has is not offered without the taint that it is dead."""
    has_owner = {c for info in world.kubelet.view.dra.claims for c in node.given[info.uid]} | node.allocated()
    has_owner |= {g.card for g in given_by_us(world) if g.card is not None} | others_cards(world).keys()
    dead = {
        slice_name(DeviceKey(card))
        for card in set(node.cards) - has_owner
        if world.is_dead(card)
        and (group := world.group_of(card)) is not None
        and world.tree.holder_of(group) is None
    }
    devices = [d for s in node.api.slices(DRIVER) for d in s["spec"].get("devices") or ()]
    return [
        f"{d['name']} is dead, and is offered with the taints {d.get('taints')}"
        for d in devices
        if d["name"] in dead and str(Cause.DEAD) not in [t.get("value") for t in d.get("taints") or ()]
    ]


def _not_offered(node: ClaimsNode) -> list[str]:
    """At rest every card is offered, once, without a taint."""
    devices = [d for s in node.api.slices(DRIVER) for d in s["spec"].get("devices") or ()]
    names = Counter(d["name"] for d in devices)
    wanted = Counter(slice_name(DeviceKey(card)) for card in node.cards)
    found = [] if names == wanted else [f"the slices offer {sorted(names)}, not {sorted(wanted)}"]
    return found + [f"{d['name']} has the taints {d['taints']}" for d in devices if d.get("taints")]
