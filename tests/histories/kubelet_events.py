"""Events on kubelet's side: its life, its calls and connections, its ledger, pods and their machines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeAlias

import trio
from grpclib import GRPCError
from grpclib.const import Cardinality

from gpuactors.core.values.model import ResourceName
from gpuactors.grpc_trio import Channel, open_channel
from gpuactors.kubelet.kubelet import socket_name
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateRequest,
    DevicePluginStub,
    Empty,
    ListAndWatchResponse,
    RegisterRequest,
)
from gpuactors.kubelet.pb.podresources.v1 import ListPodResourcesRequest, PodResourcesListerStub
from gpuactors_simulation.kubelet.plugins import LIST_AND_WATCH
from gpuactors_simulation.kubelet.transport import KUBELET_SOCKET, POD_RESOURCES_SOCKET
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.kinds import Act, Flag, Kind, always, crash, detail_of, fault
from tests.histories.truth import given_by_us
from tests.histories.world import MODEL, MODELS, OTHER_CLIENT, RENAMED, SECOND, World
from tests.memory.faults import Fault

FOR_TWO: Final = "a pod for two cards comes"
PODS_MAX: Final = 16
BOTH_WITHIN_S: Final = 0.5
"""How long a card may take to be listed, or a pod to run, before both cards of its group are released."""

STAYS_S: Final = 3.0
"""How long another client than kubelet stays on our endpoint."""

LIST_EVERY_S: Final = 0.1
"""Of another program, and less than kubelet allows all together."""

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS: Final = b"\0\0\0\x04\0\0\0\0\0"
_GARBAGE: Final = (
    b"\0" * 40,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    _PREFACE[:10],
    _PREFACE + _SETTINGS,
    _PREFACE + _SETTINGS + b"\xff\xff\xff\0\0\0\0\0\x01",
    _PREFACE + _SETTINGS + b"\0\0\x05\x01\x04\0\0\0\x01\x80\x80\x80\x80\xff",
    _PREFACE + _SETTINGS + b"\0\0\x04\x08\0\0\0\0\0\0\0\0\0",
    _PREFACE + _SETTINGS + b"\0\0\x04\x03\0\0\0\0\x09\0\0\0\x08",
)
"""Not HTTP/2; HTTP/1; a torn preface; no request; a frame too long; bad HPACK; WINDOW_UPDATE 0; RST of no stream."""


def _resource(world: World, slot: int) -> str:
    names = list(MODELS.values() if world.kata is None else RENAMED.values())
    return names[slot % len(names)]


def _endpoint(world: World, slot: int) -> str:
    return socket_name(ResourceName(_resource(world, slot)), "")


def _bytes(slot: int) -> int:
    """1 to about 500: within the preface, the SETTINGS, a frame's header, a message, the trailers."""
    return 1 + detail_of(slot) * detail_of(slot) // 20


# --- its process and its connections ----------------------------------------------------------------------


async def _stop(world: World, _slot: int) -> None:
    await world.kubelet.stop()
    world.kubelet_runs = False


async def _start(world: World, _slot: int) -> None:
    await world.start_kubelet()


def _runs(world: World, _slot: int) -> bool:
    return world.kubelet_runs


def _cut(world: World, slot: int) -> None:
    """Every connection to an endpoint breaks, or only kubelet's."""
    resource = _resource(world, slot)
    if detail_of(slot) % 2 and resource in world.kubelet.view.connected:
        with suppress(KeyError):
            world.kubelet.lose_stream(resource)
    else:
        world.transport.cut(_endpoint(world, slot))


def _cut_within(world: World, slot: int) -> None:
    world.transport.cut(_endpoint(world, slot), after_bytes=_bytes(slot))


def _cut_next(endpoint: str) -> Act:
    return lambda w, s: w.transport.cut_next(endpoint, _bytes(s))


_Visit: TypeAlias = Callable[[Channel, int, World], Awaitable[None]]


# --- other clients ----------------------------------------------------------------------------------------


def _garbage(world: World, slot: int) -> None:
    """Bytes that are not gRPC on our endpoint; half of the clients stay for a while, half go at once."""

    async def send() -> None:
        stream = await world.transport.try_dial(_endpoint(world, slot), OTHER_CLIENT)
        if stream is None:
            return
        async with stream:
            try:
                await stream.send_all(_GARBAGE[detail_of(slot) % len(_GARBAGE)])
            except trio.BrokenResourceError:
                return
            await trio.sleep(STAYS_S * (slot % 2))

    world.in_background(send)


def _visit(world: World, slot: int, call: _Visit) -> None:
    async def visit() -> None:
        stream = await world.transport.try_dial(_endpoint(world, slot), OTHER_CLIENT)
        if stream is None:
            return
        async with open_channel(stream) as channel:
            try:
                with trio.move_on_after(STAYS_S):
                    await call(channel, slot, world)
            except GRPCError:
                return

    world.in_background(visit)


async def _watches(channel: Channel, _slot: int, _world: World) -> None:
    async with channel.server_stream(LIST_AND_WATCH, Empty(), ListAndWatchResponse) as lists:
        async for _ in lists:
            pass


async def _allocates_nonsense(channel: Channel, slot: int, _world: World) -> None:
    """A device that is not there, no device, or one twice."""
    ids: tuple[list[str], ...]
    ids = ([f"0000:77:{detail_of(slot) % 32:02x}.0"], [], ["0000:01:00.0"] * 2, ["", "\x00" * 40])
    request = AllocateRequest(container_requests=[ContainerAllocateRequest(devices_ids=ids[slot % 4])])
    await DevicePluginStub(channel).allocate(request)


async def _sends_a_wrong_message(channel: Channel, _slot: int, _world: World) -> None:
    call = channel.request(
        "/v1beta1.DevicePlugin/Allocate", Cardinality.UNARY_UNARY, RegisterRequest, AllocateResponse
    )
    async with call:
        await call.send_message(RegisterRequest(version="\x07", endpoint="\xff" * 30), end=True)
        await call.recv_message()


async def _gives_up(channel: Channel, slot: int, world: World) -> None:
    """Asks for a card that exists, and is gone before the answer: no pod gets a device."""
    address = world.address(slot)
    request = AllocateRequest(container_requests=[ContainerAllocateRequest(devices_ids=[address])])
    with trio.move_on_after(0):
        await DevicePluginStub(channel).allocate(request)


def _visits(call: _Visit) -> Act:
    return lambda w, s: _visit(w, s, call)


async def lists(world: World) -> None:
    """Another program asks kubelet for all pods, as exporters of metrics do."""
    stream = await world.transport.try_dial(POD_RESOURCES_SOCKET, OTHER_CLIENT)
    if stream is None:
        return
    async with stream, open_channel(stream) as channel:
        await PodResourcesListerStub(channel).list(ListPodResourcesRequest())


def _lists(world: World, slot: int) -> None:
    """Several times in a row; half of them for as long as an Allocate may take."""

    async def again() -> None:
        for _ in range(2 + slot % 20):
            with suppress(GRPCError):
                await lists(world)
            await trio.sleep(LIST_EVERY_S)

    world.in_background(again)


# --- pods -------------------------------------------------------------------------------------------------


def _room(world: World, _slot: int) -> bool:
    return world.pods < PODS_MAX


def _submit(size: int) -> Act:
    def act(world: World, _slot: int) -> None:
        world.pods += 1
        world.kubelet.submit(f"vm-{world.pods}", {world.resource(MODEL): size})

    return act


def _submit_other(world: World, slot: int) -> None:
    world.pods += 1
    world.kubelet.submit(f"vm-{world.pods}", {world.resource(list(MODELS)[1 + slot % 2]): 1})


def _has_pods(world: World, _slot: int) -> bool:
    return any(pod.phase is not Phase.TERMINATING for pod in world.kubelet.view.pods.values())


def _pod(world: World, slot: int) -> str:
    """Running ones first, as most of the others end soon."""
    pods = world.kubelet.view.pods
    running = sorted(name for name, pod in pods.items() if pod.phase is Phase.RUNNING)
    names = running or sorted(name for name, pod in pods.items() if pod.phase is not Phase.TERMINATING)
    return names[slot % len(names)]


def _delete(dies_after_s: float) -> Act:
    return lambda w, s: w.kubelet.delete(_pod(w, s), dies_after_s=dies_after_s)


def _force_delete(dies_after_s: float | None) -> Act:
    return lambda w, s: w.kubelet.force_delete(_pod(w, s), dies_after_s=dies_after_s)


def _has_machine(world: World, _slot: int) -> bool:
    return any(pod.name in world.kubelet.view.pods for pod in world.kubelet.containers)


def _machine_ends(world: World, slot: int) -> None:
    names = sorted(p.name for p in world.kubelet.containers if p.name in world.kubelet.view.pods)
    world.kubelet.end_process(names[slot % len(names)])


def _has_left_over(world: World, _slot: int) -> bool:
    return any(pod.name not in world.kubelet.view.pods for pod in world.kubelet.containers)


def _left_over_ends(world: World, _slot: int) -> None:
    names = [pod.name for pod in world.kubelet.containers if pod.name not in world.kubelet.view.pods]
    world.kubelet.end_process(names[0])


# --- both cards of a group --------------------------------------------------------------------------------


def _pods_with_both(world: World) -> list[str]:
    """The running pods that have two cards of one group."""
    cards: dict[str, list[int | None]] = {}
    for g in given_by_us(world):
        if g.card is not None and g.card in world.tree.functions:
            cards.setdefault(g.pod, []).append(world.tree.functions[g.card].group)
    running = {name for name, pod in world.kubelet.view.pods.items() if pod.phase is Phase.RUNNING}
    return sorted(pod for pod, groups in cards.items() if pod in running and len(set(groups)) < len(groups))


def _can_have_both(world: World, slot: int) -> bool:
    """A card that no pod has and no process holds, whose group has a second one, or room for it."""
    address, second = world.address(slot), world.address(slot, SECOND)
    return (
        _room(world, slot)
        and world.kubelet_runs
        and world.is_plugged(slot)
        and world.is_bound(address)
        and not world.is_held(slot)
        and (second not in world.tree.functions or world.is_bound(second))
        and world.tree.functions[address].device == MODEL
    )


async def _release_both(world: World, slot: int) -> None:
    """Pods get both cards of a group and every other card; then the pod with both is force-deleted, so that both are
    free at once, and the next pod gets one of them."""
    if world.address(slot, SECOND) not in world.tree.functions:
        world.plug_beside(slot)
    with trio.move_on_after(BOTH_WITHIN_S):
        await world.kubelet.until(lambda view: any(r.id == world.address(slot, SECOND) for r in view.devices))
    for size in (2, None):
        figures = world.kubelet.view.resources.get(world.resource(MODEL))
        free = figures.free if figures is not None else 0
        if free > 0 and _room(world, slot):
            _submit(min(size or free, free))(world, slot)
            with trio.move_on_after(BOTH_WITHIN_S):
                await world.kubelet.settled(f"vm-{world.pods}")
    if names := _pods_with_both(world):
        world.kubelet.force_delete(names[slot % len(names)], dies_after_s=0.0)
    if _room(world, slot):
        _submit(1)(world, slot)


def _burst(world: World, _slot: int) -> None:
    """As many pods for one card each as there are cards free."""
    figures = world.kubelet.view.resources.get(world.resource(MODEL))
    for _ in range(max(1, figures.free if figures is not None else 1)):
        if world.pods < PODS_MAX:
            world.pods += 1
            world.kubelet.submit(f"vm-{world.pods}", {world.resource(MODEL): 1})


def _damage_file(world: World, _slot: int) -> None:
    world.transport.checkpoint_damaged = True


KUBELET_KINDS: Final = (
    Kind(
        "kubelet stops",
        _runs,
        _stop,
        needs={Flag.KUBELET_RUNS: True},
        leaves={Flag.KUBELET_RUNS: False},
    ),
    Kind(
        "kubelet starts",
        lambda w, _s: not w.kubelet_runs,
        _start,
        needs={Flag.KUBELET_RUNS: False},
        leaves={Flag.KUBELET_RUNS: True},
    ),
    Kind(
        "the API server goes away",
        lambda w, _s: w.kubelet.has_api_server,
        lambda w, _s: w.lose_api_server(),
        needs={Flag.API_SERVER_IS_AWAY: False},
        leaves={Flag.API_SERVER_IS_AWAY: True},
    ),
    Kind(
        "the API server is back",
        lambda w, _s: not w.kubelet.has_api_server,
        lambda w, _s: w.find_api_server(),
        needs={Flag.API_SERVER_IS_AWAY: True},
        leaves={Flag.API_SERVER_IS_AWAY: False},
    ),
    Kind("sockets cannot be made", always, fault(Fault.BIND_FAILS, 2)),
    Kind("Register fails", always, fault(Fault.REGISTER_FAILS, 2)),
    Kind("Register takes long", always, fault(Fault.REGISTER_SLOW, 2)),
    Kind("a stream is lost", always, _cut),
    Kind("a stream is cut within a message", always, _cut_within),
    Kind("the next Register is cut", always, _cut_next(KUBELET_SOCKET)),
    Kind("the next List is cut", always, _cut_next(POD_RESOURCES_SOCKET)),
    Kind("garbage on our endpoint", always, _garbage),
    Kind("another program lists", _runs, _lists),
    Kind("another client watches", always, _visits(_watches)),
    Kind("another client allocates nonsense", always, _visits(_allocates_nonsense)),
    Kind("another client sends a wrong message", always, _visits(_sends_a_wrong_message)),
    Kind("another client abandons an Allocate", always, _visits(_gives_up)),
    crash("the kubelet watcher crashes", Fault.KUBELET_WATCHER_CRASHES),
    crash("a plugin crashes", Fault.PLUGIN_CRASHES),
    Kind("reads of the ledger fail", always, fault(Fault.READ_FAILS, 2)),
    Kind("reads of the ledger take long", always, fault(Fault.READ_SLOW, 3)),
    Kind("the ledger is answered with nonsense", always, fault(Fault.READ_MALFORMED, 2)),
    Kind(
        "the ledger file is damaged",
        lambda w, _s: w.transport.checkpoint is not None and not w.transport.checkpoint_damaged,
        _damage_file,
        needs={Flag.FILE_IS_DAMAGED: False},
        leaves={Flag.FILE_IS_DAMAGED: True},
    ),
    crash("the reader of the ledger crashes", Fault.LEDGER_CRASHES),
    Kind("a pod comes", _room, _submit(1)),
    Kind(FOR_TWO, _room, _submit(2)),
    Kind("a pod for another model comes", _room, _submit_other),
    Kind("pods come in a burst", _room, _burst),
    Kind(
        "both cards of a group are released", _can_have_both, _release_both, needs={Flag.KUBELET_RUNS: True}
    ),
    Kind("a pod ends", _has_pods, _delete(0.0)),
    Kind("a pod ends slowly", _has_pods, _delete(4.0)),
    Kind("a pod is force-deleted", _has_pods, _force_delete(None)),
    Kind("a pod is force-deleted and dies late", _has_pods, _force_delete(9.0)),
    Kind("a virtual machine ends by itself", _has_machine, _machine_ends),
    Kind("a machine that outlived its pod ends", _has_left_over, _left_over_ends),
)
"""Every kind of event on kubelet's side."""
