"""A hand-over in the core: what the daemon that hands over still answers while its streams end."""

from __future__ import annotations

from gpuactors import limits
from gpuactors.core.events.daemon import HandOverRequested, Ticked
from gpuactors.core.events.host import FunctionInspected
from gpuactors.core.step import next_deadline
from gpuactors.core.values.effects import Granted, Refused
from gpuactors.core.values.model import PciAddress
from tests.core.builders import A, B, Core, allocate_call, gpu, pre_start_call


def test_an_allocate_that_comes_while_the_streams_still_end_is_answered() -> None:
    """Issue 37, 25: it was refused with "gpuactors is stopping", and kubelet fails such a pod for good."""
    core = Core(gpu(A), gpu(B))
    core.feed(HandOverRequested())
    core.feed(allocate_call(A))
    inspection = core.state.host.inspections.functions[PciAddress(A)]
    (granted,) = core.answers(FunctionInspected(inspection, PciAddress(A), (gpu(A),)))
    assert isinstance(granted, Granted)
    (refused,) = core.answers(pre_start_call(B, token=2))
    assert isinstance(refused, Refused), "kubelet repeats it"


def test_an_allocate_that_waits_at_the_hand_over_is_answered() -> None:
    """It came between the last answer and the request: it was refused, and kubelet fails such a pod for good."""
    core = Core(gpu(A))
    core.feed(allocate_call(A))
    inspection = core.state.host.inspections.functions[PciAddress(A)]
    assert core.answers(HandOverRequested()) == []
    (granted,) = core.answers(FunctionInspected(inspection, PciAddress(A), (gpu(A),)))
    assert isinstance(granted, Granted)


def test_a_late_allocate_holds_up_the_hand_over_for_a_moment_only() -> None:
    for before, after in ((HandOverRequested(), allocate_call(A)), (allocate_call(A), HandOverRequested())):
        core = Core(gpu(A))
        core.feed(before)
        core.feed(after)
        assert next_deadline(core.state) == core.at + limits.LATE_CALL_S
        (refused,) = core.answers(Ticked(), after_s=limits.LATE_CALL_S)
        assert isinstance(refused, Refused)
