"""A life of the machine whose power is cut, from the daemon's start on: what `scenario_power_cut` does with kubelet.

A module of its own, because grpcio's import takes seconds, in which the daemon starts already.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY, KubeletStandIn
from tests.vm.guest.daemon import START_TIMEOUT_S, DaemonProcess
from tests.vm.guest.node import NAMED_WITHIN_S, SLACK_S, by_address, last_reason
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.scenario_power_cut import (
    KUBELET_DIR,
    LIVES,
    PORTS,
    STATE_DIR,
    WORKING_S,
    Life,
    announce_cut,
    sockets,
)
from tests.vm.guest.sysfs import Function, function_behind

RESOURCE: Final = "pci-1234/11e8"

FRAME_WITHIN_S: Final = UNSETTLED_INSPECTIONS_S[0] + SLACK_S
TRUE_COMPLAINTS: Final = {
    "device.changed": "bound to no driver",
    "kubelet.gone": "kubelet.sock does not exist",
    "plugin.unregistered": "no process listens",
}
"""What may be warned of in a life's beginning, with its words: nothing is bound yet; kubelet is not there yet, or its
socket alone."""


@dataclass(frozen=True, slots=True)
class _Node:
    guest: Guest
    life: Life
    kubelet: KubeletStandIn
    functions: tuple[Function, ...]
    given: Mapping[str, str]
    """Address → pod's UID, as kubelet's ledger had it when the machine booted."""

    def wait(self, wanted: Mapping[str, str], within_s: float) -> None:
        self.kubelet.wait_for(
            lambda lists: by_address(lists) == wanted, within_s, f"lists with {dict(wanted)}"
        )


def live(guest: Guest, life: Life, daemon: DaemonProcess, given: Mapping[str, str]) -> None:
    """Kubelet is there before the daemon, and has removed the sockets that were left; or the daemon finds them."""
    kubelet = KubeletStandIn(KUBELET_DIR, synced=True)
    functions = tuple(function_behind(guest.machine, port) for port in PORTS)
    node = _Node(guest, life, kubelet, functions, given)
    kubelet_first = life.draw.random() < 0.5
    with ExitStack() as stack:
        with guest.step(
            f"{'kubelet' if kubelet_first else 'the daemon'} is there first, and the daemon listens"
        ):
            if given:
                kubelet.restore_pods()
            if kubelet_first:
                stack.enter_context(kubelet)
            daemon.wait_until_it_listens()
            if not kubelet_first:
                stack.enter_context(kubelet)
        _finds_its_lists(node, daemon)
        _bound_again(node, daemon)
        if not life.is_last:
            announce_cut(life, WORKING_S)
            _works_for_ever(node)
        _others_follow(node, daemon)
        _ends(node, daemon)


def _finds_its_lists(node: _Node, daemon: DaemonProcess) -> None:
    with node.guest.step(
        "what the ledger has given away is listed, though nothing is bound; nothing else is"
    ):
        node.wait(dict.fromkeys(node.given, UNHEALTHY), FRAME_WITHIN_S)
        for address, uid in node.given.items():
            reason = last_reason(daemon, address)
            assert f"allocated to pod with UID {uid}, but bound to no driver" in reason, reason
    with node.guest.step("no complaint but what is true; its own control socket"):
        for line in _complaints(daemon):
            assert TRUE_COMPLAINTS[line["event"]] in line["reason"], line
        eventually("the control socket", _control_answers, timeout_s=SLACK_S)


def _complaints(daemon: DaemonProcess) -> list[dict[str, str]]:
    lines = [json.loads(line) for line in daemon.log_file.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line["level"] not in ("debug", "info")]
    for line in found:
        print(f"    {line}", flush=True)
    return found


def _control_answers() -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(STATE_DIR / "gpuactors.sock"))
        except OSError:  # not there, or left behind by a daemon that is dead
            return False
    return True


def _bound_again(node: _Node, daemon: DaemonProcess) -> None:
    with node.guest.step("bound: all Healthy, the given ones given"):
        for function in node.functions:
            function.bind_vfio()
        node.wait(dict.fromkeys((function.address for function in node.functions), HEALTHY), FRAME_WITHIN_S)
        for address, uid in node.given.items():
            assert last_reason(daemon, address) == f"allocated to pod with UID {uid}"
    for frame in node.kubelet.frames(RESOURCE):
        assert set(node.given) <= set(frame.ids), f"capacity below allocated: {frame}"


def _others_follow(node: _Node, daemon: DaemonProcess) -> None:
    kubelet = node.kubelet
    with node.guest.step("the pods end, and others get the same GPUs"):
        kubelet.hear_of_pods()
        for uid in set(node.given.values()):
            kubelet.end_pod(uid)
        wanted = {}
        for function in node.functions:
            eventually("an Allocate", partial(_given, kubelet, function), timeout_s=SLACK_S)
            wanted[function.address] = f"allocated to pod default/new-{function.address}"
        eventually(
            "the new pods' names",
            lambda: all(last_reason(daemon, address) == reason for address, reason in wanted.items()),
            timeout_s=NAMED_WITHIN_S,
        )


def _given(kubelet: KubeletStandIn, function: Function) -> bool:
    """Whether kubelet could give it to a new pod: not while it still has the old one's on its device lists."""
    try:
        kubelet.allocate(RESOURCE, [function.address], pod=f"new-{function.address}")
    except ValueError:
        return False
    return True


def _ends(node: _Node, daemon: DaemonProcess) -> None:
    guest = node.guest
    with guest.step("the last life ends in order"):
        assert daemon.terminate() == 0
        daemon.check_one_life()
        assert not node.kubelet.panics, node.kubelet.panics
        left = [path.name for path in sockets()]
        assert left == ["kubelet.sock", "kubelet.sock"], left
        began = [json.loads(line) for line in (guest.artifacts / LIVES).read_text().splitlines()]
        guest.figures["power_cuts"] = len(began) - 1
        guest.figures["lives_that_began_with_pods"] = sum(bool(before["given"]) for before in began)
        guest.figures["lives_that_began_with_dead_sockets"] = sum(bool(before["sockets"]) for before in began)


def _works_for_ever(node: _Node) -> None:
    """Bind, unbind, allocate and end pods, without a pause; each allocation is a ledger that is written."""
    draw, kubelet = node.life.draw, node.kubelet
    kubelet.hear_of_pods()
    pods = dict(node.given)
    count = 0
    began = time.monotonic()
    while time.monotonic() < began + START_TIMEOUT_S:
        count += 1
        function = draw.choice(node.functions)
        pod = pods.get(function.address)
        if pod is not None:
            kubelet.end_pod(pod)
            del pods[function.address]
        elif draw.random() < 0.3:
            function.unbind()
            function.bind_by_address()
            node.wait(dict.fromkeys((other.address for other in node.functions), HEALTHY), FRAME_WITHIN_S)
        else:
            pods[function.address] = f"vm-{count}"
            try:
                kubelet.allocate(RESOURCE, [function.address], pod=f"vm-{count}")
            except ValueError:  # the pod before it has not quite ended
                del pods[function.address]
    raise AssertionError("the power was not cut")
