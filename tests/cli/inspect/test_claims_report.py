"""What `inspect` and `explain` print of claims, read off states that the real core made."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from gpuactors.cli.inspect import claims_report
from gpuactors.cli.inspect.report import (
    as_json,
    as_table,
    claim_explanation,
    claim_explanation_json,
    explanation,
    explanation_json,
)
from gpuactors.cli.inspect.view import (
    Explained,
    ExplainedClaim,
    Inspected,
    UnknownAddressError,
    find,
    find_named,
)
from gpuactors.control.node_view import view_of
from gpuactors.core.claims.outputs import CheckpointWanted
from gpuactors.core.events.claims import CheckpointRefused, FitnessChecked, SlicesPublished
from gpuactors.core.events.host import UeventsOpened
from gpuactors.core.kinds.table import slice_name
from gpuactors.core.state.claims import ClaimedGpu, GpuReservation, StoredEntry
from gpuactors.core.state.gpus import GpuSettings
from gpuactors.core.values.claim import (
    ActFault,
    Claim,
    ClaimName,
    ClaimsOf,
    ClaimUid,
    FitnessFinding,
    OriginalDriver,
)
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.model import DeviceKey, PciAddress
from gpuactors.core.values.prebound import OperatorsList
from gpuactors.core.values.slices import Publication, ServerKeeps
from tests.control.test_view import received
from tests.core.builders import Core, audio, gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, name

HOST, BOUND, FREE, NAMED = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0"
"""On its host's driver and claimed; pre-bound and claimed; on its host's driver; named by the operator."""

VMD = "10000:01:00.0 has a PCI domain of more than four digits (it is behind an Intel VMD controller), which is long"


@pytest.fixture(scope="module")
def core() -> ClaimCore:
    operator = OperatorsList(frozenset({PciAddress(NAMED)}))
    core = ClaimCore(
        gpu(HOST, group=1, driver="nvidia"),
        audio("0000:01:00.1", 1, driver="snd_hda_intel"),
        gpu(BOUND, group=2),
        gpu(FREE, group=3, driver="nvidia"),
        gpu(NAMED, group=4, driver="nvidia"),
        gpu_settings=GpuSettings(operator),
    )
    core.api |= {
        str(name(n)): allocated(name(n), a) for n, a in (("one", HOST), ("two", HOST), ("pre", BOUND))
    }
    core.feed(UeventsOpened())
    core.prepare(name("one"))
    core.prepare(name("pre"))
    core.pass_time(200)
    core.prepare(name("two"))
    core.pass_time(3)
    left_out = {"gpu-10000-01-00-0": VMD}
    published = Publication(
        "gpu.nvidia.com", ServerKeeps.NO, True, 3, 1, (), ("gpu-0000-03-00-0",), left_out, ""
    )
    core.feed(SlicesPublished(published, ClaimsOf.GPUS))
    return core


def by_daemon(core: Core) -> Inspected:
    source = "the running daemon (process 7, version 1.2.3)"
    return Inspected(view_of(core.state, core.at), True, source, node="gpu-17", wall=1795363200.0)


def explained(core: Core, address: str) -> str:
    found = by_daemon(core)
    return explanation(Explained(find(found.view, address), found), 100)


def claim_explained(core: Core, claim: str) -> str:
    found = by_daemon(core)
    named = find_named(found, claim)
    assert isinstance(named, ExplainedClaim)
    return claim_explanation(named, 100)


def test_the_table_has_the_claims_and_the_slices(core: ClaimCore) -> None:
    table = as_table(by_daemon(core), 100)
    assert all(len(line) <= 100 for line in table.splitlines())
    *_, claims, slices = table.split("\n\n")
    assert claims.splitlines() == [
        "Claims of driver gpu.nvidia.com",
        f"  default/one  Prepared for 3 min  {HOST}",
        f"  default/pre  Prepared for 3 min  {BOUND}",
        f"  default/two  Waiting for 3 s  {HOST}  (1 call of kubelet waits)",
        f"    {HOST}: it belongs to the claim default/one; it is free when its pod has ended: wait, or",
        "      delete one of the two pods, so that it is scheduled anew",
    ]
    assert slices.splitlines()[:2] == [
        "ResourceSlices: 1, generation 3, as offered",
        "  withdrawn: gpu-0000-03-00-0",
    ]
    assert slices.splitlines()[2].startswith(f"  left out: gpu-10000-01-00-0: {VMD[:40]}")


def test_a_gpu_on_its_hosts_driver_is_offered_to_claims(core: ClaimCore) -> None:
    (line,) = (line for line in as_table(by_daemon(core)).splitlines() if FREE in line)
    assert "offered to claims  on nvidia; a claim binds it to" in line
    assert "bind it to vfio-pci to offer it" not in explained(core, FREE)
    off = Core(gpu(FREE, group=3, driver="nvidia"))
    (line,) = (line for line in as_table(by_daemon(off)).splitlines() if FREE in line)
    assert "not listed" in line
    assert "claim" not in as_table(by_daemon(off)), "without DRA nothing is said of claims"


@pytest.mark.parametrize(
    ("address", "lines"),
    [
        (
            HOST,
            (
                "Claim             default/one, UID uid-one: Prepared for 3 min",
                "At a claim's end  it is returned to nvidia: it was found on nvidia",
                "Original driver   nvidia",
                "                  snd_hda_intel (0000:01:00.1)",
            ),
        ),
        (
            BOUND,
            (
                "At a claim's end  it stays on its vfio driver: it was found on vfio-pci, and no claim of gpuactors",
                "                  had put it there",
                "Original driver   vfio-pci",
            ),
        ),
        (
            FREE,
            (
                "Claim             none; it is offered to claims",
                "At a claim's end  it is returned to nvidia: it was found on nvidia",
            ),
        ),
        (NAMED, (f"At a claim's end  it stays on its vfio driver: --prebound {NAMED} says so",)),
    ],
)
def test_explain_says_which_rule_decides_what_becomes_of_a_gpu(
    core: ClaimCore, address: str, lines: tuple[str, ...]
) -> None:
    told = explained(core, address).splitlines()
    assert [line for line in lines if line not in told] == []


def test_the_rule_is_a_word_in_json(core: ClaimCore) -> None:
    rules = {
        d["address"]: (d["for_claims"]["stays_on_vfio"], d["for_claims"]["rule"], d["for_claims"]["offer"])
        for d in json.loads(as_json(by_daemon(core)))["devices"]
    }
    assert rules == {
        HOST: (False, "first-driver", "claimed"),
        BOUND: (True, "first-driver", "claimed"),
        FREE: (False, "first-driver", "offered"),
        NAMED: (True, "operator", "offered"),
    }
    found = by_daemon(core)
    one = json.loads(explanation_json(Explained(find(found.view, HOST), found)))["for_claims"]["claim"]
    assert (one["namespace"], one["name"], one["uid"], one["state"]) == (
        "default",
        "one",
        "uid-one",
        "Prepared",
    )


def test_a_claim_keeps_the_rule_that_decided_when_it_reserved_the_gpu() -> None:
    """The operator's list may be another one after a restart: what the claim does at its end was decided before."""
    operator = OperatorsList(frozenset({PciAddress(HOST)}))
    core = ClaimCore(gpu(HOST, group=1, driver="nvidia"), gpu_settings=GpuSettings(operator))
    core.prepare(allocated(name("one"), HOST))
    after = core.restarted(settings=GpuSettings())
    assert f"it stays on its vfio driver: --prebound {HOST} says so" in explained(after, HOST)
    view = find(by_daemon(after).view, HOST).for_claims
    assert view is not None
    assert (view.stays, view.rule) == (True, "")
    after.unprepare(name("one"))
    assert after.driver(HOST) == "vfio-pci", "what was said is what was done"


def test_a_claim_is_explained_by_its_name_or_uid(core: ClaimCore) -> None:
    told = claim_explained(core, "default/two")
    assert told == claim_explained(core, "uid-two")
    assert told.splitlines() == [
        "Claim default/two",
        "Waiting: another claim or pod, or a process, has one of its devices",
        "",
        "UID            uid-two",
        "Since          2026-11-22T15:59:57Z, 3 s ago",
        f"Problem        {HOST}: it belongs to the claim default/one; it is free when its pod has ended:",
        "               wait, or delete one of the two pods, so that it is scheduled anew",
        "Waiting calls  1",
        f"Device         {HOST}, GH100 [H100 SXM5 80GB], on vfio-pci",
        "                 it is returned to nvidia: it was found on nvidia",
        "Node           gpu-17",
        "Seen by        the running daemon (process 7, version 1.2.3)",
    ]
    found = by_daemon(core)
    named = find_named(found, "default/two")
    assert isinstance(named, ExplainedClaim)
    known = json.loads(claim_explanation_json(named))
    assert (known["state"], known["devices"], known["waiting_calls"]) == ("Waiting", [HOST], 1)


def test_a_claim_that_is_not_known(core: ClaimCore) -> None:
    found = by_daemon(core)
    assert find_named(found, HOST) is None, "an address is no claim"
    with pytest.raises(UnknownAddressError, match="it knows default/one, default/pre, default/two"):
        find_named(found, "default/none")
    with pytest.raises(UnknownAddressError, match="--dra off"):
        find_named(by_daemon(Core(gpu(HOST, group=1))), "default/one")
    with pytest.raises(UnknownAddressError, match="only the running daemon knows claims"):
        find_named(replace(found, by_daemon=False, view=replace(found.view, claims=None)), "default/one")


def test_after_its_end_a_claim_is_remembered_and_its_gpu_is_offered_again() -> None:
    core = ClaimCore(gpu(HOST, group=1, driver="nvidia"))
    core.prepare(allocated(name("one"), HOST))
    core.unprepare(name("one"))
    core.changed(core.functions[PciAddress(HOST)])
    core.pass_time(5)
    assert "Unprepared: nothing of it is left" in claim_explained(core, "default/one")
    assert "none; it is offered to claims" in explained(core, HOST)


def test_why_a_gpu_is_not_offered_to_claims_is_said() -> None:
    """The slice has the taint; its reason is in no other place that an operator looks at."""
    core = ClaimCore(gpu(FREE, group=3, driver="nvidia"))
    core.pass_time(1)
    look = core.wanted.fitness_check
    assert look is not None
    why = "nvidia-smi -pm 1 keeps it started; nvidia-smi -i 0000:03:00.0 -pm 0 ends that"
    core.feed(FitnessChecked(look.number, (FitnessFinding(DeviceKey(FREE), ActFault.IN_USE, why),)))
    assert why in " ".join(as_table(by_daemon(core)).split())
    assert "held" in explained(core, FREE)
    assert " ".join(why.split()) in " ".join(explained(core, FREE).split())
    (device,) = json.loads(as_json(by_daemon(core)))["devices"]
    assert (device["for_claims"]["offer"], device["for_claims"]["blocked"]) == ("held", why)


def test_why_no_claim_is_served_is_said() -> None:
    core = ClaimCore(gpu(HOST, group=1, driver="nvidia"))
    core.feed(CheckpointRefused("a newer version has written the checkpoint: go back to it", ClaimsOf.GPUS))
    assert "a newer version has written the checkpoint: go back to it" in as_table(by_daemon(core))


def test_the_wire_changes_nothing_of_claims(core: ClaimCore) -> None:
    view = view_of(core.state, core.at)
    assert view.claims is not None
    assert received(view).view == view


def test_a_gpu_of_a_container_that_was_taken_over_stays_on_its_hosts_driver() -> None:
    """And its claim has no name before kubelet has listed it."""
    uid = ClaimUid("uid-old")
    entry = StoredEntry(
        ClaimName("", "", uid),
        ClaimState.TAKEN_OVER,
        Claim(ClaimName("", "", uid), None, 0, ()),
        GpuReservation(
            (
                ClaimedGpu(
                    DeviceKey(FREE), (OriginalDriver(PciAddress(FREE), None, vfio=True),), "it stays as it is"
                ),
            )
        ),
    )
    core = ClaimCore(gpu(FREE, group=3, driver="nvidia"), disk=CheckpointWanted(1, (entry,), ()))
    told = explained(core, FREE)
    assert "At a claim's end  it stays on nvidia: it stays as it is" in told
    assert "Claim             (UID uid-old), UID uid-old: TakenOver" in told
    claims = by_daemon(core).view.claims
    claim = claims_report.claim_named(claims, str(uid))
    assert claim is not None
    facts = claims_report.claim_explanation(claim, by_daemon(core).view, lambda _: "now")
    assert ("Device", "  it stays on nvidia: it stays as it is") in facts


def test_a_gpu_is_found_by_the_name_of_its_device_in_a_slice(core: ClaimCore) -> None:
    assert find(by_daemon(core).view, slice_name(DeviceKey(HOST))).address == HOST
