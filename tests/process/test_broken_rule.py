"""A bug in the daemon that breaks a rule of its lists: in production it is said, and costs one device."""

from __future__ import annotations

from typing import Final

from tests.process.daemon import gpuactors
from tests.process.node import H100, HEALTHY, UNHEALTHY, address, open_node

GIVEN, FREE, LATER = (address(slot) for slot in (0x23, 0x24, 0x25))

WRONG_STATUS: Final = """
from msgspec.structs import replace
from gpuactors.core.assessment import assess
from gpuactors.core.values.model import Health

right = assess.status_of

def wrong(device, holding, *rest):
    status = right(device, holding, *rest)
    return replace(status, health=Health.UNHEALTHY, message="planted") if holding and holding.is_allocated else status

assess.status_of = wrong
"""
"""Whoever has a GPU has it Unhealthy: kubelet would subtract it twice."""


def test_a_rule_that_does_not_hold_ends_no_daemon() -> None:
    with open_node() as node:
        for slot in (0x23, 0x24):
            node.plug(slot, "2330", driver="vfio-pci")
        with node.daemon(tolerated={"rule.broken"}, planted=WRONG_STATUS) as daemon:
            node.wait_device_lists({H100: {GIVEN: HEALTHY, FREE: HEALTHY}})
            node.kubelet.allocate(H100, [GIVEN], pod="vm")
            rule = "it is allocated to pod default/vm but Unhealthy (planted)"
            said = daemon.wait_event("rule.broken", device=GIVEN, level="error", has=[rule])
            node.wait_device_lists({H100: {GIVEN: UNHEALTHY, FREE: HEALTHY}})
            node.tell(node.plug(0x25, "2330", driver="vfio-pci"))
            node.wait_device_lists({H100: {GIVEN: UNHEALTHY, FREE: HEALTHY, LATER: HEALTHY}})
            told = gpuactors("explain", GIVEN, f"--state-dir={node.directory / 's'}").stdout
            assert f"Unhealthy: {said['reason']}" in told
            assert "this is a bug in gpuactors: report it with the journal" in told
            node.assert_sound(daemon)
