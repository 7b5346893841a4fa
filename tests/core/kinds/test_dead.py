"""A dead GPU: by passive signs only, out of every offer, and back when the kernel has enumerated it again."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuactors.core.events.daemon import PredecessorGone
from gpuactors.core.events.host import (
    FunctionInspected,
    FunctionsInspected,
    HostChanged,
    HostScanned,
    InspectionFailed,
)
from gpuactors.core.kinds.dead import dead
from gpuactors.core.kinds.table import slice_name
from gpuactors.core.reports.snapshot import project
from gpuactors.core.step import initial_state
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import DraHealth
from gpuactors.core.values.dead_signs import DeadSign, DeadSigns, KnownErrors
from gpuactors.core.values.effects import Refused
from gpuactors.core.values.model import Health, PciFunction, Role, Sign, device_key, pci_address
from gpuactors.core.values.slices import BlockKind, BlockReason
from tests.core.builders import SETTINGS, A, B, Core, allocate_call, audio, gpu, node, only
from tests.core.gpus.claim_core import ClaimCore, allocated, name

AUDIO: Final = pci_address("0000:01:00.1")
WELL: Final = replace(gpu(A, 7), presence=11)
SILENT: Final = replace(WELL, is_silent=True)
FATAL: Final = replace(WELL, has_fatal_errors=True)
SIGNS: Final = {
    "silent": (SILENT, "it does not answer: its configuration space reads all ones"),
    "fatal": (FATAL, "it has had a fatal PCIe error (aer_dev_fatal)"),
}


def free(core: Core) -> int:
    """The scheduler's free count: allocatable less allocated."""
    return sum(h == Health.HEALTHY for h in core.device_list().values()) - len(core.ledger)


@pytest.mark.parametrize("sign", SIGNS)
def test_a_free_dead_gpu_is_unhealthy_and_allocated_to_nobody(sign: str) -> None:
    function, says = SIGNS[sign]
    core = node(WELL, gpu(B))
    core.inspect(A, function)
    assert core.device_list() == {A: Health.UNHEALTHY, B: Health.HEALTHY}
    assert core.reason(A).startswith(says)
    assert f"have the kernel enumerate {A} again" in core.reason(A)
    core.feed(allocate_call(A))
    refused = only(Refused, core.answers(core.inspected(A, function)))
    assert (refused.causes, refused.reason) == ((Cause.DEAD,), f"{A}: {core.reason(A)}")


@pytest.mark.parametrize("sign", SIGNS)
def test_an_allocate_is_refused_when_the_gpu_died_after_the_list(sign: str) -> None:
    core = node(WELL, gpu(B))
    core.feed(allocate_call(A))  # no event has told of it
    refused = only(Refused, core.answers(core.inspected(A, SIGNS[sign][0])))
    assert refused.causes == (Cause.DEAD,)


@pytest.mark.parametrize("sign", SIGNS)
def test_an_allocated_dead_gpu_is_subtracted_once(sign: str) -> None:
    core = node(WELL, gpu(B), ledger={A: "vm-1"})
    assert free(core) == 1
    core.inspect(A, SIGNS[sign][0])
    assert (core.device_list()[A], free(core)) == (Health.HEALTHY, 1)
    del core.ledger[A]
    core.pass_time(60.0)
    assert (core.device_list()[A], free(core)) == (Health.UNHEALTHY, 1)
    assert core.state.assessments[device_key(A)].status.cause is Cause.DEAD


def test_one_that_answers_again_is_back_only_when_it_was_enumerated_again() -> None:
    core = node(WELL, gpu(B))
    core.inspect(A, SILENT)
    core.inspect(A, WELL)
    assert core.device_list()[A] == Health.UNHEALTHY, "it has lost its state"
    core.inspect(A)
    assert A not in core.device_list()
    core.inspect(A, replace(WELL, presence=12))
    assert core.device_list()[A] == Health.HEALTHY


def test_a_counter_that_begins_anew_without_a_known_presence_brings_it_back() -> None:
    core = node(replace(WELL, presence=0), gpu(B))
    for sign in (replace(SILENT, presence=0), replace(FATAL, presence=0)):
        core.inspect(A, sign)
        assert core.device_list()[A] == Health.UNHEALTHY
        core.inspect(A, replace(WELL, presence=0))
        assert core.device_list()[A] == Health.HEALTHY, "nothing shows that it is the same function"


def test_a_fatal_error_that_only_the_port_above_counts_is_a_sign() -> None:
    below = replace(WELL, port_fatal_errors=3)
    core = node(below, gpu(B))
    assert core.device_list()[A] == Health.HEALTHY, "those were before it was seen"
    core.inspect(A, replace(below, port_fatal_errors=None))
    assert core.device_list()[A] == Health.HEALTHY
    core.inspect(A, replace(below, port_fatal_errors=4))
    assert core.device_list()[A] == Health.UNHEALTHY
    assert core.reason(A).startswith(
        "it has had a fatal PCIe error (aer_rootport_total_err_fatal of the port above)"
    )
    core.inspect(A, replace(below, port_fatal_errors=4))
    assert core.device_list()[A] == Health.UNHEALTHY
    core.inspect(A, replace(below, presence=12, port_fatal_errors=5))
    assert core.device_list()[A] == Health.HEALTHY, "enumerated again"


def test_a_count_of_the_port_that_is_read_late_is_no_sign() -> None:
    core = node(WELL, gpu(B))
    core.inspect(A, replace(WELL, port_fatal_errors=4))
    assert core.device_list()[A] == Health.HEALTHY


KEPT: Final = {A: DeadSign(11, Sign.SILENT)}


def after_restart(*functions: PciFunction) -> Core:
    """A daemon that starts with what another one has kept."""
    core = Core()
    core.state = initial_state(SETTINGS, dead_signs=KEPT)
    core.feed(HostScanned(1, functions))
    return core


def test_a_dead_gpu_stays_dead_over_a_restart_until_it_was_enumerated_again() -> None:
    core = after_restart(WELL, gpu(B))
    assert core.device_list() == {A: Health.UNHEALTHY, B: Health.HEALTHY}
    assert core.reason(A).startswith("it does not answer")
    core.inspect(A)
    core.inspect(A, WELL)
    assert core.device_list()[A] == Health.UNHEALTHY, "a selector had left it out"
    core.inspect(A, replace(WELL, presence=12))
    assert core.device_list()[A] == Health.HEALTHY
    assert core.state.host.dead_signs == {}


def test_a_gpu_that_was_enumerated_again_while_no_daemon_ran_is_well() -> None:
    core = after_restart(replace(WELL, presence=12), gpu(B))
    assert core.device_list() == {A: Health.HEALTHY, B: Health.HEALTHY}
    assert core.state.host.dead_signs == {}, "the file is written without it"


def test_a_sign_is_kept_for_a_function_that_is_not_there() -> None:
    assert after_restart(gpu(B)).state.host.dead_signs == KEPT


def test_a_sign_says_nothing_of_a_function_whose_presence_is_unknown() -> None:
    core = after_restart(replace(WELL, presence=0), gpu(B))
    assert core.device_list()[A] == Health.HEALTHY
    assert core.state.host.dead_signs == KEPT


@pytest.mark.parametrize(
    ("function", "health", "kept"),
    [
        (WELL, Health.UNHEALTHY, KEPT),
        (replace(WELL, presence=12), Health.HEALTHY, {}),
        (replace(FATAL, presence=12), Health.UNHEALTHY, {A: DeadSign(12, Sign.FATAL)}),
    ],
    ids=["the same", "another", "another dead one"],
)
def test_a_daemon_that_takes_over_knows_what_the_one_before_has_kept(
    function: PciFunction, health: Health, kept: DeadSigns
) -> None:
    core = node(function, gpu(B))
    core.state = replace(core.state, daemon=replace(core.state.daemon, role=Role.TAKING_OVER))
    core.feed(PredecessorGone("handed over", dead_signs=KEPT))
    assert core.device_list()[A] == health
    assert core.state.host.dead_signs == kept


@pytest.mark.parametrize(
    ("function", "sign"),
    [
        (SILENT, Sign.SILENT),
        (FATAL, Sign.FATAL),
        (replace(WELL, port_fatal_errors=4), Sign.PORT),
        (WELL, None),
        (replace(SILENT, presence=0), None),
    ],
)
def test_what_is_kept_is_the_first_sign_of_each_function(function: PciFunction, sign: Sign | None) -> None:
    core = node(replace(WELL, port_fatal_errors=3), gpu(B))
    core.inspect(A, function)
    kept = {} if sign is None else {A: DeadSign(11, sign)}
    assert core.state.host.dead_signs == kept
    core.inspect(A, replace(WELL, is_silent=True, has_fatal_errors=True, port_fatal_errors=7))
    assert core.state.host.dead_signs == (kept or {A: DeadSign(11, Sign.SILENT)})


def test_inspections_that_come_together_forget_no_sign() -> None:
    core = node(WELL, replace(gpu(B, 7), presence=21))
    core.feed(HostChanged(A, None, "change pci"), HostChanged(B, None, "change pci"))
    numbers = core.state.host.inspections.functions
    beside = replace(gpu(B, 7), presence=21)
    core.feed(
        FunctionsInspected(
            (
                FunctionInspected(numbers[A], A, (SILENT, beside)),
                FunctionInspected(numbers[B], B, (WELL, beside)),
            )
        )
    )
    assert core.device_list()[A] == Health.UNHEALTHY


def test_a_read_is_requested_with_the_errors_that_are_known() -> None:
    core = node(replace(WELL, port_fatal_errors=3), gpu(B))
    assert project(core.state).inspections.errors == KnownErrors({}, {A: 3})
    core.inspect(A, replace(WELL, port_fatal_errors=4))
    assert project(core.state).inspections.errors == KnownErrors({A: DeadSign(11, Sign.PORT)}, {A: 4})
    before = initial_state(SETTINGS, dead_signs=KEPT)
    assert project(before).inspections.errors == KnownErrors(KEPT, {}), "also with the first scan"


def test_a_failed_inspection_does_not_bring_it_back() -> None:
    core = node(WELL, gpu(B))
    core.inspect(A, SILENT)
    core.pass_time(300.0)
    core.feed(InspectionFailed(core.scan, A, "hangs", shortage=False))  # of no outstanding one
    assert core.device_list()[A] == Health.UNHEALTHY
    core.inspect(A, replace(WELL, fault="cannot be read"))
    assert core.state.assessments[device_key(A)].status.cause is Cause.DEAD


def test_the_sign_comes_before_all_else_that_is_wrong() -> None:
    core = node(replace(SILENT, fault="cannot be read", nodes=()), gpu(B))
    assert core.state.assessments[device_key(A)].status.cause is Cause.DEAD


@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci"])
@pytest.mark.parametrize("sign", SIGNS)
def test_no_claim_gets_a_dead_gpu_and_its_taint_says_so(sign: str, driver: str) -> None:
    on_driver = gpu(A, 7, driver=driver)
    shown = SIGNS[sign][0]
    core = ClaimCore(replace(on_driver, is_silent=shown.is_silent, has_fatal_errors=shown.has_fatal_errors))
    assert core.state.offered.offer is not None
    (offered,) = core.state.offered.offer.devices
    assert offered.name == slice_name(device_key(A))
    assert offered.blocked == BlockReason(BlockKind.UNHEALTHY, "Dead")
    assert SIGNS[sign][1] in core.refusal(core.prepare(allocated(name("one"), A)))
    assert core.acts == []


@pytest.mark.parametrize("sign", SIGNS)
def test_a_claim_waits_for_a_gpu_whose_inspection_has_failed_and_may_have_missed_its_death(sign: str) -> None:
    core = ClaimCore(gpu(A, 7, driver="nvidia"))
    known = core.functions[A]
    core.changed(replace(known, fault="the inspection did not end in time"))
    token = core.prepare(allocated(name("one"), A))
    assert (core.acts, core.answer(token)) == ([], None)
    shown = SIGNS[sign][0]
    core.changed(replace(known, is_silent=shown.is_silent, has_fatal_errors=shown.has_fatal_errors))
    assert SIGNS[sign][1] in core.refusal(token)
    assert core.acts == []


def test_the_status_of_a_claims_pod_shows_that_its_gpu_died() -> None:
    core = ClaimCore(gpu(A, 7, driver="nvidia"))
    core.answer(core.prepare(allocated(name("one"), A)))
    bound = core.functions[A]
    core.changed(replace(bound, has_fatal_errors=True))
    (health,) = core.wanted.health
    assert (health.health, SIGNS["fatal"][1] in health.message) == (DraHealth.UNHEALTHY, True)
    core.unprepare(name("one"))
    assert core.driver(A) == "nvidia", "it is returned all the same"


def test_a_companion_takes_the_gpu_with_it_and_another_gpu_of_the_group_does_not() -> None:
    sound = replace(audio(AUDIO, 7), has_fatal_errors=True)
    core = node(WELL, sound, gpu(B, 8))
    assert core.reason(A).startswith(f"{AUDIO}, which goes with it, has had a fatal PCIe error")
    assert f"have the kernel enumerate {AUDIO} again" in core.reason(A)
    beside = node(WELL, replace(gpu(B, 7), is_silent=True))
    assert beside.device_list() == {A: Health.HEALTHY, B: Health.UNHEALTHY}


def test_a_part_is_as_dead_as_its_card() -> None:
    card = replace(gpu(B, 8, driver="nvidia"), has_virtual_functions=True, is_silent=True)
    part = replace(gpu("0000:02:00.4", 9), physical=B)
    core = Core(card, part)
    (device,) = (d for d in core.state.index.devices.values() if d.units[0] == part)
    reason = dead(device)
    assert reason is not None
    assert reason.message.startswith(f"{B}, which it is a part of, does not answer")
    assert core.state.assessments[device.key].status.cause is Cause.DEAD


_FUNCTIONS: Final = st.builds(
    lambda silent, fatal, presence: replace(
        WELL, is_silent=silent, has_fatal_errors=fatal, presence=presence
    ),
    st.booleans(),
    st.booleans(),
    st.integers(11, 13),
)


@given(st.lists(_FUNCTIONS, min_size=1, max_size=8), st.booleans())
def test_whatever_inspections_find_a_dead_gpu_is_out_and_counted_once(
    seen: list[PciFunction], has_pod: bool
) -> None:
    core = node(WELL, gpu(B), ledger={A: "vm-1"} if has_pod else {})
    dead_presence = 0
    for function in seen:
        core.inspect(A, function)
        if function.is_silent or function.has_fatal_errors:
            dead_presence = function.presence
        elif function.presence != dead_presence:
            dead_presence = 0
        is_dead = dead_presence != 0
        healthy = has_pod or not is_dead
        assert core.device_list()[A] == (Health.HEALTHY if healthy else Health.UNHEALTHY)
        assert free(core) == (1 if has_pod or is_dead else 2)
