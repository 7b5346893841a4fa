"""What is written so that the server has the wanted pool (contract: ResourceSlices, Writing)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import pytest
from msgspec.structs import replace

from gpuactors.core.claims.pool import Pool
from gpuactors.core.claims.slice_writes import Answered, Create, Delete, Update, Write, name_prefix, writes
from gpuactors.core.values.slices import Attribute, SliceDevice, SliceSpec, StoredSlice, Taint
from tests.core.builders import only

DRIVER, NODE, OWNER = "gpu.nvidia.com", "node-1", "node-uid"
TAINT = Taint("gpu.nvidia.com/held", "HeldByOther")


def device(name: str, *taints: Taint) -> SliceDevice:
    return SliceDevice(name, {"type": Attribute("string", "vfio")}, taints)


def pool(*slices: Iterable[SliceDevice]) -> Pool:
    return Pool(DRIVER, NODE, tuple(tuple(devices) for devices in slices))


class Server:
    """A naive server: stores what is written, with a new version."""

    def __init__(self) -> None:
        self.stored: dict[str, StoredSlice] = {}
        self.answers: dict[str, Answered] = {}
        self._numbers = count(1)

    def write(self, write: Write) -> None:
        match write:
            case Create(index, spec):
                name = f"{name_prefix(index, DRIVER, NODE)}{next(self._numbers):05d}"
                self.store(name, spec)
            case Update(stored, spec):
                assert self.stored[stored.name] == stored
                self.store(stored.name, spec)
            case Delete(stored):
                del self.stored[stored.name]

    def store(self, name: str, spec: SliceSpec) -> None:
        version = str(next(self._numbers))
        self.stored[name] = StoredSlice(name, f"uid-{name}", version, OWNER, spec)

    def settle(self, wanted: Pool) -> tuple[Write, ...]:
        """Writes what is to be written, and expects that nothing is left to write then."""
        found = self.writes(wanted)
        for write in found:
            self.write(write)
        assert self.writes(wanted) == ()
        self.expect_whole(wanted)
        return found

    def writes(self, wanted: Pool, seen: int = 0) -> tuple[Write, ...]:
        return writes(wanted, OWNER, self.stored.values(), self.answers, seen)

    def expect_whole(self, wanted: Pool) -> None:
        """As the scheduler reads a pool: those of the highest generation, as many as each says."""
        specs = [s.spec for _, s in sorted(self.stored.items())]
        top = max(spec.generation for spec in specs)
        current = [spec for spec in specs if spec.generation == top]
        assert {spec.slice_count for spec in current} == {len(current)}
        assert [spec.devices for spec in current] == [*wanted.slices]


def kinds(found: Iterable[Write]) -> list[type[Write]]:
    return [type(write) for write in found]


A, B, C, D = (device(f"gpu-{n}") for n in "abcd")


def test_the_first_pool_is_created() -> None:
    server = Server()
    found = server.settle(pool([A, B], [C]))
    assert kinds(found) == [Create, Create]
    assert {s.spec.generation for s in server.stored.values()} == {1}
    assert [name[:28] for name in sorted(server.stored)] == [
        "00000-gpu.nvidia.com-node-1-",
        "00001-gpu.nvidia.com-node-1-",
    ]


def test_an_empty_pool_has_one_empty_slice() -> None:
    server = Server()
    create = only(Create, server.settle(pool([])))
    assert create.spec.devices == ()


def test_what_is_stored_as_wanted_is_not_written() -> None:
    server = Server()
    server.settle(pool([A, B]))
    assert server.writes(pool([A, B])) == ()


def test_a_change_of_one_slice_keeps_the_generation() -> None:
    server = Server()
    server.settle(pool([A, B], [C]))
    found = server.settle(pool([A, B], [device("gpu-c", TAINT)]))
    assert kinds(found) == [Update]
    assert {s.spec.generation for s in server.stored.values()} == {1}


def test_a_change_of_two_slices_is_a_new_generation_of_all() -> None:
    server = Server()
    server.settle(pool([A], [B], [C]))
    found = server.settle(pool([device("gpu-a", TAINT)], [B], [device("gpu-c", TAINT)]))
    assert kinds(found) == [Update, Update, Update]
    assert {s.spec.generation for s in server.stored.values()} == {2}


def test_one_more_slice_is_a_new_generation_of_all() -> None:
    """The first taint of a pool halves its slices."""
    server = Server()
    server.settle(pool([A, B, C, D]))
    found = server.settle(pool([device("gpu-a", TAINT), B], [C, D]))
    assert kinds(found) == [Update, Create]
    assert {s.spec.generation for s in server.stored.values()} == {2}


def test_one_slice_less_is_deleted_when_the_others_are_written() -> None:
    server = Server()
    server.settle(pool([A, B], [C]))
    found = server.settle(pool([A, B, C]))
    assert kinds(found) == [Update, Delete]
    # The scheduler ignores a pool with one slice too many, so the one that stays does not wait for the delete.
    assert {s.spec.generation for s in server.stored.values()} == {2}


def test_a_slice_that_was_deleted_is_created_again_in_its_generation() -> None:
    server = Server()
    server.settle(pool([A], [B]))
    del server.stored[max(server.stored)]
    assert kinds(server.settle(pool([A], [B]))) == [Create]
    assert {s.spec.generation for s in server.stored.values()} == {1}


def test_a_pool_that_was_deleted_gets_a_generation_above_the_last_one() -> None:
    (create,) = Server().writes(pool([A]), seen=7)
    assert isinstance(create, Create)
    assert create.spec.generation == 8


@pytest.mark.parametrize(
    "edit",
    [
        lambda spec: replace(spec, devices=(A,)),
        lambda spec: replace(spec, devices=(B, A)),
        lambda spec: replace(spec, devices=(A, device("gpu-b", TAINT))),
        lambda spec: replace(spec, devices=(A, SliceDevice("gpu-b", {"type": Attribute("string", "gpu")}))),
        lambda spec: replace(spec, foreign=("devices[0].allowMultipleAllocations",)),
        lambda spec: replace(spec, slice_count=2),
    ],
    ids=["a device less", "another order", "a taint", "an attribute", "an unknown field", "the count"],
)
def test_an_edit_is_restored(edit: object) -> None:
    assert callable(edit)
    server = Server()
    server.settle(pool([A, B]))
    (name,) = server.stored
    server.store(name, edit(server.stored[name].spec))
    assert kinds(server.settle(pool([A, B]))) == [Update]


def test_another_type_of_the_same_value_is_an_edit() -> None:
    """In Python True is 1."""
    server = Server()
    wanted = pool([SliceDevice("gpu-a", {"iommuFDEnabled": Attribute("bool", True)})])
    server.settle(wanted)
    (name,) = server.stored
    edited = SliceDevice("gpu-a", {"iommuFDEnabled": Attribute("int", 1)})
    server.store(name, replace(server.stored[name].spec, devices=(edited,)))
    assert kinds(server.settle(wanted)) == [Update]


def test_a_slice_without_our_node_as_its_owner_gets_it_again() -> None:
    server = Server()
    server.settle(pool([A]))
    (name,) = server.stored
    server.stored[name] = replace(server.stored[name], owner=None)
    assert kinds(server.settle(pool([A]))) == [Update]


def test_the_time_of_a_taint_is_taken_over_and_not_compared() -> None:
    """gate-on-slice-put-without-time-added: the server sets it anew at each write that leaves it out."""
    server = Server()
    server.settle(pool([device("gpu-a", TAINT), B]))
    (name,) = server.stored
    timed = replace(TAINT, time_added="2026-11-21T20:27:12Z")
    server.store(name, replace(server.stored[name].spec, devices=(device("gpu-a", timed), B)))
    assert server.writes(pool([device("gpu-a", TAINT), B])) == ()
    update = only(Update, server.writes(pool([device("gpu-a", TAINT), device("gpu-b", TAINT)])))
    assert [d.taints[0].time_added for d in update.spec.devices] == ["2026-11-21T20:27:12Z", None]


def test_the_time_of_a_taint_moves_with_the_device_to_another_slice() -> None:
    server = Server()
    timed = replace(TAINT, time_added="2026-11-21T20:27:12Z")
    server.settle(pool([A, device("gpu-b", timed)]))
    _, create = server.writes(pool([A], [device("gpu-b", TAINT)]))
    assert isinstance(create, Create)
    assert create.spec.devices[0].taints[0].time_added == "2026-11-21T20:27:12Z"


def test_another_reason_is_another_taint_with_a_time_of_its_own() -> None:
    server = Server()
    server.settle(pool([device("gpu-a", replace(TAINT, time_added="2026-11-21T20:27:12Z"))]))
    update = only(Update, server.writes(pool([device("gpu-a", replace(TAINT, value="Orphaned"))])))
    assert update.spec.devices[0].taints[0].time_added is None


def test_what_the_server_made_of_our_write_is_not_written_again() -> None:
    """The gate is off: the taint is dropped at each write (upstream wrote it again for ever)."""
    server = Server()
    wanted = pool([device("gpu-a", TAINT)])
    create = only(Create, server.writes(wanted))
    dropped = replace(create.spec, devices=(A,))
    server.store("00000-x", dropped)
    assert kinds(server.writes(wanted)) == [Update]
    server.answers["00000-x"] = Answered(create.spec, dropped)
    assert server.writes(wanted) == ()
    assert kinds(server.writes(pool([device("gpu-a", TAINT), B]))) == [Update]
    server.store("00000-x", replace(dropped, devices=()))
    assert kinds(server.writes(wanted)) == [Update]


def test_of_two_slices_with_one_place_one_is_deleted() -> None:
    """A create that was carried out and not answered, and then done again."""
    server = Server()
    server.settle(pool([A]))
    (name,) = server.stored
    server.store(f"{name}x", server.stored[name].spec)
    assert kinds(server.settle(pool([A]))) == [Delete]


def test_a_slice_of_another_naming_is_replaced() -> None:
    """Another driver of this name, before the helper of 1.36 (`node-1-gpu.nvidia.com-k4srp`)."""
    server = Server()
    server.store("node-1-gpu.nvidia.com-k4srp", SliceSpec(DRIVER, NODE, NODE, 5, 1, (A,)))
    found = server.settle(pool([A]))
    assert kinds(found) == [Create, Delete]
    assert {s.spec.generation for s in server.stored.values()} == {6}


def test_a_slice_of_another_pool_is_deleted() -> None:
    """`spec.pool.name` is immutable (slice-put-other-pool), and there is one pool for each driver and node."""
    server = Server()
    server.store("00000-gpu.nvidia.com-node-1-abcde", SliceSpec(DRIVER, NODE, "other", 1, 1, (A,)))
    assert kinds(server.settle(pool([A]))) == [Create, Delete]


def test_every_change_between_pools_settles_in_one_round() -> None:
    pools = [
        pool([]), pool([A]), pool([A, B]), pool([A], [B]), pool([device("gpu-a", TAINT)], [B]),
        pool([A], [device("gpu-b", TAINT)]), pool([A], [B], [C]), pool([B], [C], [A, D]),
    ]  # fmt: skip
    for before in pools:
        for after in pools:
            server = Server()
            server.settle(before)
            server.settle(after)
