"""The slice publisher in any order of what happens to it: the server comes to have what is offered, and then rests.

What is drawn is the order of events and trio's schedule. At the end every fault is over; then nothing but the last
offer decides what the server has, one scheduler could use it as it is, and nobody writes any more.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from trio.testing import MockClock

from gpuactors.core.values.slices import OfferedDevice
from gpuactors_simulation.kube.server import ApiFault, FakeApiServer
from gpuactors_simulation.kube.status import NODES, SLICES, Object
from tests.actors.test_slice_publisher import HELD, Published, device, offer, published
from tests.kube.cluster import NODE

DEVICES = [device(n) for n in range(66)]

Op = tuple[str, int]


def offered(number: int) -> list[OfferedDevice]:
    """Some of the devices, by the bits of a number; the first few of 66 may be blocked or claimed."""
    few = [
        replace(DEVICES[n], blocked=HELD if number >> (n + 3) & 1 else None)
        for n in range(3)
        if number >> n & 1
    ]
    few = [replace(d, claimed=True) if number & 64 else d for d in few]
    return few + (DEVICES[3:] if number & 128 else [])


def edit(found: Published, change: Callable[[Object], None]) -> None:
    for stored in found.server.slices()[:1]:
        found.server.edit_slice(stored["metadata"]["name"], change)


def no_devices(stored: Object) -> None:
    stored["spec"].pop("devices", None)


def other_generation(stored: Object) -> None:
    stored["spec"]["pool"]["generation"] += 3


async def happen(found: Published, op: Op) -> None:
    server, (what, number) = found.server, op
    match what:
        case "offer":
            found.offers.set(offer(*offered(number)))
        case "nothing":
            found.offers.set(None)
        case "wait":
            await trio.sleep((0.0, 0.01, 0.3, 2.0, 40.0, 700.0, 4000.0)[number % 7])
        case "wiped":
            server.delete_slices()
        case "one deleted":
            for stored in server.slices()[-1:]:
                server.store.delete(SLICES, "", stored["metadata"]["name"])
        case "edited":
            edit(found, (no_devices, other_generation)[number % 2])
        case "fault":
            server.order([*ApiFault][number % len(ApiFault)], 1 + number % 3)
        case "broken":
            server.break_connections()
        case "away":
            server.go_away()
        case "back":
            server.away = False
        case "gate":
            server.device_taints = not server.device_taints
        case "forgets":
            server.store.forget()
        case "node":
            if server.store.find(NODES, "", NODE) is not None:
                server.store.delete(NODES, "", NODE)
            server.add_node(NODE)
        case _:
            raise AssertionError(what)


WHAT = (
    "offer", "offer", "offer", "wait", "wait", "wait", "wiped", "one deleted", "edited", "fault", "fault", "broken",
    "away", "back", "gate", "forgets", "node", "nothing",
)  # fmt: skip


async def history(ops: list[Op], last: int, gate: bool, seed: int) -> None:
    trio._core._run._r.seed(seed)  # Hypothesis makes the schedule the same each time
    async with published(None, FakeApiServer(device_taints=gate)) as found:
        for op in ops:
            await happen(found, op)
        found.server.away = False
        found.server.end_faults()
        found.server.break_connections()  # what hangs ends
        found.offers.set(offer(*reversed(offered(last))))
        await trio.sleep(120.0)
        await trio.sleep(3700.0)  # whether taints are kept has been asked since
        await found.settled(120.0)
        expect(found, offered(last))
        await found.expect_peace()
        expect(found, offered(last))


def expect(found: Published, last: list[OfferedDevice]) -> None:
    gate = found.server.device_taints
    kept = [d for d in last if gate or d.blocked is None or d.claimed]
    assert found.names() == [d.name for d in kept]
    assert [*found.tainted()] == [d.name for d in kept if gate and d.blocked is not None]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 255)), max_size=14),
    st.integers(0, 255),
    st.booleans(),
    st.integers(0, 2**32),
)
@example([("offer", 255), ("wait", 4), ("gate", 0), ("fault", 8), ("offer", 129)], 129, True, 1)
@example([], 127, False, 1)
def test_after_any_order_the_server_has_what_is_offered(
    ops: list[Op], last: int, gate: bool, seed: int
) -> None:
    trio.run(history, ops, last, gate, seed, clock=MockClock(autojump_threshold=0))
