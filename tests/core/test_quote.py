"""What others said, in our sentences: printable and short, whatever it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuactors.core.deviceplugin.device_lists import HISTORY_UNKNOWN_MAX
from gpuactors.core.events.deviceplugin import AllocateAsked, PreStartAsked
from gpuactors.core.events.host import FunctionInspected
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.reports.snapshot import report
from gpuactors.core.values.effects import Answer, Log, Refused
from gpuactors.core.values.model import (
    CachedAnswer,
    ClaimedDevice,
    DeviceId,
    Holder,
    LedgerEntry,
    Pod,
    ResourceName,
    Token,
)
from gpuactors.core.values.quote import first_of, printable, quoted, quoted_ids
from gpuactors.grpc_trio.limits import GRPC_STATUS_TEXT_MAX_CHARS
from tests.core.builders import H100, Core, allocate_call, gpu, ledger_read

ODD = "\x1b[2J\x00\r\n\x7f\x9b\u202e\u2066\u2028\u2029\ufeff"
"""A terminal's control sequences, in C0 and C1; direction marks; line separators; a byte order mark."""

SENTENCE_MAX_CHARS = 2 * GRPC_STATUS_TEXT_MAX_CHARS


def test_what_is_not_printable_is_shown_as_an_escape() -> None:
    assert printable("0000:23:00.0 größer ²") == "0000:23:00.0 größer ²"
    assert printable("a\x1b[2J\x9b\u202e\u2028\ud800\U000e0001\n") == (
        r"a\x1b[2J\x9b\u202e\u2028\ud800\U000e0001\n"
    )


@given(st.text(st.characters()), st.integers(0, 40))
def test_whatever_it_was_it_is_printable_and_short(text: str, chars_max: int) -> None:
    said = quoted(text, chars_max)
    assert said.isprintable()
    assert len(said) <= chars_max + len("… (100 characters)")
    assert said.encode().decode() == said


def test_of_a_long_text_the_begin_is_shown_and_its_length() -> None:
    assert quoted("x" * 5000, 3) == "xxx… (5,000 characters)"
    assert quoted("xxx", 3) == "xxx"


def test_of_many_devices_the_first_are_named_and_the_rest_counted() -> None:
    ids = [str(n) for n in range(1037)]
    assert first_of(ids) == (*ids[:16], "and 1,021 more")
    assert quoted_ids(["\n", "2"]) == (r"\n", "2")


def test_pods_processes_and_claims_are_quoted() -> None:
    for said in (
        str(Pod(ODD, ODD * 999, "")),
        str(Pod("", "", ODD * 999)),
        str(Holder(7, ODD * 999, None)),
    ):
        assert said.isprintable()
        assert len(said) < 700


def assert_fit(core: Core, answers: list[Answer]) -> None:
    """Every sentence that came out is printable, and none is long."""
    reasons = [a.reason for a in answers if isinstance(a, Refused)]
    reasons += [a.reason for device_list in core.state.published.device_lists.values() for a in device_list]
    reasons += [device.reason for device in report(core.state)]
    fields = [e.fields for e in core.effects if isinstance(e, Log)]
    for field in (f for each in fields for f in each.values()):
        reasons += [field] if isinstance(field, str) else list(field) if isinstance(field, tuple) else []
    for reason in reasons:
        assert reason.isprintable(), reason
        assert len(reason) < SENTENCE_MAX_CHARS, reason


def test_a_refusal_does_not_echo_what_was_sent() -> None:
    core = Core(gpu("01:00.0"))
    for ids in (
        (ODD,),
        ("9" * 5000,),
        tuple(f"{ODD}{n}" for n in range(8000)),
        ("x" * 250_000, "x" * 250_000),
        (ODD, ODD),
    ):
        devices = tuple(map(DeviceId, ids))
        for event in (AllocateAsked(Token(1), H100, (devices,)), PreStartAsked(Token(2), H100, devices)):
            answers = core.answers(event)
            assert [type(a) for a in answers] == [Refused]
            assert_fit(core, answers)


def test_names_in_kubelets_ledger_are_quoted_where_a_reason_has_them() -> None:
    core = Core(gpu("01:00.0"), gpu("02:00.0"), gpu("03:00.0"), gpu("04:00.0", 3))
    core.silent = True
    core.feed(KubeletAppeared("socket"))
    pod = Pod(ODD * 999, ODD * 999, "")
    entries = (
        LedgerEntry(H100, DeviceId("0000:01:00.0"), pod),
        LedgerEntry(ResourceName(ODD * 999), DeviceId("0000:02:00.0"), pod),
    )
    claims = (ClaimedDevice("gpu.nvidia.com", "node", "gpu-0000-03-00-0", ODD * 999, pod),)
    core.feed(ledger_read(core.read, entries, claims))
    assert "allocated to pod" in core.reason("0000:01:00.0")
    assert_fit(core, [])


def test_odd_ids_that_come_into_kubelets_ledger_and_leave_it_are_quoted_in_the_log() -> None:
    core = Core(gpu("01:00.0"))
    for odd in (ODD, "x" * 5000):
        for there in (True, False):
            core.ledger = {odd: "vm"} if there else {}
            core.feed(KubeletAppeared(f"socket {odd[:1]} {there}"))
            assert (odd in core.device_list()) is there
    said = [effect.name for effect in core.effects if isinstance(effect, Log)]
    assert {"device.changed", "device.gone"} <= set(said)
    assert_fit(core, [])


def test_of_many_who_have_one_device_the_first_are_named() -> None:
    core = Core(gpu("01:00.0"))
    core.others = {(f"example.com/{n:03}", "0000:01:00.0"): "vm" for n in range(40)}
    core.feed(KubeletAppeared("socket"))
    assert core.reason("0000:01:00.0").endswith("and 24 more")
    assert_fit(core, core.answers(allocate_call("0000:01:00.0")))


def test_nodes_in_kubelets_file_are_quoted() -> None:
    """What Allocate answered is read from a file that others write."""
    for node in (f"/dev/vfio/{ODD}", "/dev/vfio/" + "9" * 5000):
        core = Core(gpu("01:00.0"))
        device = DeviceId("0000:01:00.0")
        core.ledger, core.cached = {device: "vm"}, (CachedAnswer(H100, device, (node,)),)
        core.feed(PreStartAsked(Token(1), H100, (device,)), after_s=1)
        ((address, inspection),) = core.state.host.inspections.functions.items()
        answers = core.answers(FunctionInspected(inspection, address, (gpu("01:00.0"),)))
        assert [type(a) for a in answers] == [Refused]
        assert_fit(core, answers)


def test_a_drivers_name_is_quoted() -> None:
    for function in (gpu("01:00.0", driver=ODD), replace(gpu("01:00.0"), driver=ODD, vfio_bound=False)):
        core = Core(gpu("02:00.0", 1), function)
        assert_fit(core, core.answers(allocate_call("0000:01:00.0")))
        assert "not viable" in core.reason("0000:02:00.0")


def test_of_ids_that_mean_nothing_the_history_of_the_last_ones_is_kept() -> None:
    core = Core(gpu("01:00.0"))
    many = HISTORY_UNKNOWN_MAX
    for n in range(2 * many):
        core.ledger = {f"strange {n}": "pod"}
        core.feed(KubeletAppeared(f"socket {n}"))
    assert f"strange {2 * many - 1}" in core.state.published.history
    assert "strange 0" not in core.state.published.history


def test_ids_that_mean_nothing_here_leave_no_history_behind_for_ever() -> None:
    core = Core(gpu("01:00.0"))
    for n in range(100):
        core.ledger = {f"strange {n}.{i}": "pod" for i in range(5)}
        core.feed(KubeletAppeared(f"socket {n}"))
    assert f"strange {n}.0" in core.device_list()
    assert len(core.state.published.history) <= HISTORY_UNKNOWN_MAX + len(core.state.host.seen)
    assert "0000:01:00.0" in core.state.published.history
