"""What happened between two tenants: who had a GPU until when, and no more of a reset than is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuactors.control.node_view import view_of
from gpuactors.control.view import ReleaseView
from gpuactors.core.ledger.releases import RELEASED_DEVICES_MAX, RELEASES, record_releases
from gpuactors.core.values.claim import Prepared
from gpuactors.core.values.effects import Granted
from gpuactors.core.values.model import DeviceKey, Release, device_key
from tests.core.builders import A, B, Core, allocate_call, gpu, node, only
from tests.core.gpus.claim_core import ClaimCore, allocated, name

RESETTABLE = replace(gpu(A, 7), presence=11, reset_methods=("flr", "bus"))


def tenants(core: Core, device: str = A) -> list[str]:
    return [release.tenant for release in core.state.kubelet.releases.get(DeviceKey(device), ())]


def shown(core: Core, device: str = A) -> list[ReleaseView]:
    (view,) = (d for d in view_of(core.state, core.at).devices if d.address == device)
    return list(view.releases)


def test_a_release_has_the_pod_and_the_methods_of_that_moment() -> None:
    core = node(RESETTABLE, gpu(B), ledger={A: "vm-1"})
    core.pass_time(60.0)
    assert core.state.kubelet.releases == {}, "it has it still"
    del core.ledger[A]
    core.pass_time(60.0)
    (release,) = core.state.kubelet.releases[device_key(A)]
    assert (release.tenant, release.presence, release.reset_methods) == ("default/vm-1", 11, ("flr", "bus"))
    core.inspect(A, replace(RESETTABLE, reset_methods=()))
    (view,) = shown(core)
    assert view == ReleaseView("default/vm-1", core.at - release.at, ("flr", "bus"), enumerated_again=False)


def test_whether_it_was_enumerated_again_is_known_and_survives_that_it_was_gone() -> None:
    core = node(RESETTABLE, gpu(B), ledger={A: "vm-1"})
    del core.ledger[A]
    core.pass_time(60.0)
    core.inspect(A)
    assert tenants(core) == ["default/vm-1"]
    core.inspect(A, replace(RESETTABLE, presence=12))
    assert [view.enumerated_again for view in shown(core)] == [True]
    core.inspect(A, replace(RESETTABLE, presence=0))
    assert [view.enumerated_again for view in shown(core)] == [False], "unknown"


def test_an_owner_that_is_named_in_another_way_is_no_release() -> None:
    core = node(RESETTABLE, gpu(B), ledger={A: "vm-1"})
    core.ledger[A] = "vm-2"
    core.pass_time(60.0)
    assert tenants(core) == []


def test_a_grant_that_no_pod_used_is_no_release() -> None:
    core = node(RESETTABLE, gpu(B))
    core.feed(allocate_call(A))
    only(Granted, core.answers(core.inspected(A, RESETTABLE)))
    core.pass_time(600.0)
    assert device_key(A) not in core.state.index.owners
    assert tenants(core) == []


def test_the_end_of_a_claim_is_a_release() -> None:
    core = ClaimCore(gpu(A, 7, driver="nvidia"))
    assert isinstance(core.answer(core.prepare(allocated(name("one"), A))), Prepared)
    assert tenants(core) == []
    core.unprepare(name("one"))
    (tenant,) = tenants(core)
    assert "one" in tenant


@given(st.lists(st.sampled_from(["vm-1", "vm-2", None]), max_size=20))
def test_each_owner_that_leaves_nobody_behind_is_one_release_and_few_are_kept(
    owners: list[str | None],
) -> None:
    core = node(RESETTABLE, gpu(B))
    expected: list[str] = []
    last: str | None = None
    for owner in owners:
        core.ledger = {A: owner} if owner is not None else {}
        core.pass_time(60.0)
        if owner is None and last is not None:
            expected.append(f"default/{last}")
        last = owner
    assert tenants(core) == expected[-RELEASES:]
    assert tenants(core, B) == []


def test_a_bounded_number_of_devices_is_remembered() -> None:
    core = node(RESETTABLE, gpu(B), ledger={A: "vm-1"})
    before = core.state
    many = {
        DeviceKey(f"d{number}"): (Release("default/vm", 1.0, 0, None),)
        for number in range(RELEASED_DEVICES_MAX)
    }
    del core.ledger[A]
    core.pass_time(60.0)
    after = replace(core.state, kubelet=replace(core.state.kubelet, releases=many))
    recorded = record_releases(before, after, 2.0).kubelet.releases
    assert len(recorded) == RELEASED_DEVICES_MAX
    assert (DeviceKey("d0") in recorded, device_key(A) in recorded) == (False, True)
