"""How kubelet finds the DRA plugin: two sockets in an order, GetInfo in time, and names for a rolling update."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
import pytest
import trio
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.concurrency.latest import Latest
from gpuactors.core.values.claim import DeviceHealth
from gpuactors.grpc_trio import BoundListener, ConnectError, Owner, bind_unix
from gpuactors.kubelet.dra import plugin as dra_plugin
from gpuactors.kubelet.dra.plugin import PluginIo, UnixClaims, plugin_io_of_the_node, socket_paths
from gpuactors.ports.claims import PluginStatus
from gpuactors.ports.errors import KubeletError
from tests.kubelet.dra.serving import DRIVER, WITHIN_S, Core, Plugin, serving, short_directory
from tests.support.dra_grpcio import GET_INFO_S, REGISTRATION, plugin, prepare_request, registration
from tests.support.patience import patient

CLAIM: Final = ("default", "claim-a", "uid-a")
POD_UID: Final = "4a1d77c0-0f1e-4a53-9a2b-6f1c0d9e8b7a"


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


async def get_info(served: Plugin, timeout_s: float = WITHIN_S) -> Any:
    with served.dialled(served.registration) as channel:
        stub = registration(channel)["GetInfo"]
        return await served.call(stub, REGISTRATION.message("InfoRequest")(), timeout_s)


# --- GetInfo ----------------------------------------------------------------------------------------------------


async def test_get_info_names_type_driver_endpoint_and_versions_in_kubelets_order(kubelet_dir: Path) -> None:
    """1.37 opens the health stream only where it is listed; 1.36 to every DRA plugin (issues 141855, 141856)."""
    async with serving(kubelet_dir) as served:
        info = await get_info(served)
    assert (info.type, info.name) == ("DRAPlugin", DRIVER)
    assert info.endpoint == str(kubelet_dir / "plugins" / DRIVER / "dra.sock")
    assert list(info.supported_versions) == [
        "v1.DRAPlugin",
        "v1beta1.DRAPlugin",
        "v1.DRAResourceHealth",
        "v1alpha1.DRAResourceHealth",
    ]


async def test_the_endpoint_is_absolute_where_kubelets_directory_is_not(
    kubelet_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet dials it from a working directory of its own."""
    monkeypatch.chdir(kubelet_dir)
    async with serving(Path("here")) as served:
        info = await get_info(served)
        assert info.endpoint == str(kubelet_dir / "here/plugins" / DRIVER / "dra.sock")
        with served.dialled(Path(info.endpoint)) as channel:
            answer = await served.call(plugin(channel)["NodePrepareResources"], prepare_request(CLAIM))
    assert not answer.claims["uid-a"].error


async def test_get_info_is_answered_within_kubelets_1_s_while_50_prepares_hang(kubelet_dir: Path) -> None:
    """One that takes longer is asked again only after 17 s and 51 s (seen)."""
    core = Core(hold=trio.Event())
    async with serving(kubelet_dir, core) as served:
        with served.dialled() as channel:
            stub = plugin(channel)["NodePrepareResources"]
            waiting = [
                stub.future(prepare_request(("default", f"claim-{n}", f"uid-{n}")), timeout=WITHIN_S)
                for n in range(50)
            ]
            await core.until(lambda: len(core.asked) == 50)
            for _ in range(5):
                assert (await get_info(served, patient(GET_INFO_S))).name == DRIVER
            assert not any(call.done() for call in waiting)
            core.hold.set()  # type: ignore[union-attr]
            for call in waiting:
                assert await served.call(lambda _, timeout, call=call: call.result(timeout), None)


async def test_garbage_at_the_registration_socket_hurts_nobody(kubelet_dir: Path) -> None:
    async with serving(kubelet_dir) as served:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(str(served.registration))
            peer.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            assert (await get_info(served)).name == DRIVER
        with served.dialled(served.registration) as channel:
            stub: Any = channel.unary_unary("/pluginregistration.Registration/NotifyRegistrationStatus")
            with pytest.raises(grpc.RpcError):
                await served.call(stub, b"\xff\xff")
        assert not served.told
        assert (await get_info(served)).name == DRIVER


# --- NotifyRegistrationStatus -----------------------------------------------------------------------------------


async def notify(served: Plugin, registered: bool, error: str = "") -> None:
    with served.dialled(served.registration) as channel:
        stub = registration(channel)["NotifyRegistrationStatus"]
        request = REGISTRATION.message("RegistrationStatus")(plugin_registered=registered, error=error)
        await served.call(stub, request)


async def test_kubelets_verdict_is_told_with_its_text(kubelet_dir: Path) -> None:
    async with serving(kubelet_dir) as served:
        await notify(served, True)
        await notify(served, False, "none of services are supported\nby the kubelet")
        assert served.told == [
            PluginStatus(True),
            PluginStatus(False, "none of services are supported\\nby the kubelet"),
        ]


async def test_a_bug_behind_kubelets_verdict_is_no_error_to_kubelet(kubelet_dir: Path) -> None:
    """An error deregisters the plugin."""

    def told(status: PluginStatus) -> None:
        raise RuntimeError("planted")

    failures: list[Exception] = []
    claims = UnixClaims(str(kubelet_dir), DRIVER, None, lambda _, exc: failures.append(exc))
    async with claims.serve_claims(
        Core(), Latest[tuple[DeviceHealth, ...]](()).subscribe(), told
    ) as endpoint:
        await notify(Plugin(kubelet_dir, Core(), Latest(()), endpoint, [], failures, None), True)
    assert [str(failure) for failure in failures] == ["planted"]


async def test_both_sockets_are_dialled_as_everything_else_is_while_it_serves(kubelet_dir: Path) -> None:
    async def refused(path: str, *, deadline_s: float) -> NoReturn:
        raise ConnectError(f"{Path(path).name} is refused")

    dialled = UnixClaims(str(kubelet_dir), DRIVER, None, lambda *_: None)
    refusing = replace(plugin_io_of_the_node(), dial=refused)
    undialled = UnixClaims(str(kubelet_dir), DRIVER, "two", lambda *_: None, io=refusing)
    assert await undialled.unreachable() == (), "it serves nothing yet"
    health = Latest[tuple[DeviceHealth, ...]](())
    async with (
        dialled.serve_claims(Core(), health.subscribe(), lambda _: None),
        undialled.serve_claims(Core(), health.subscribe(), lambda _: None),
    ):
        with trio.fail_after(WITHIN_S):
            assert await dialled.unreachable() == ()
            assert await undialled.unreachable() == (
                "dra-two.sock is refused",
                f"{DRIVER}-two-reg.sock is refused",
            )


# --- the order of the two sockets -------------------------------------------------------------------------------


class Recorded(BoundListener):
    """Notes which sockets there are just before and just after it closes."""

    def __init__(self, listener: BoundListener, note: Callable[[str], None]) -> None:
        self._listener = listener
        self._note = note

    def still_there(self) -> bool:
        return self._listener.still_there()

    async def accept(self) -> trio.abc.Stream:
        return await self._listener.accept()

    async def aclose(self) -> None:
        self._note("closing")
        await self._listener.aclose()
        self._note("closed")


def recording(kubelet_dir: Path, seen: list[tuple[str, tuple[str, ...]]]) -> PluginIo:
    def note(what: str) -> None:
        there = tuple(sorted(path.name for path in kubelet_dir.glob("plugins*/**/*.sock")))
        seen.append((what, there))

    def bind(path: str, *, mode: int = 0o660, evict: Collection[Owner] = ()) -> BoundListener:
        note("binding")
        return Recorded(bind_unix(path, mode=mode, evict=evict), note)

    return replace(plugin_io_of_the_node(), bind=bind)


API, REG = "dra.sock", f"{DRIVER}-reg.sock"


@pytest.mark.parametrize("cancelled", [False, *[True] * 10])  # trio cancels tasks in no order
async def test_the_api_is_there_before_the_registration_and_goes_after_it(
    kubelet_dir: Path, cancelled: bool
) -> None:
    """Also where everything is cancelled at once, as when the process ends."""
    seen: list[tuple[str, tuple[str, ...]]] = []
    with trio.fail_after(WITHIN_S), trio.CancelScope() as scope:
        async with serving(kubelet_dir, io=recording(kubelet_dir, seen)) as served:
            await get_info(served)
            if cancelled:
                scope.cancel()
                await trio.sleep_forever()
    assert seen[:2] == [("binding", ()), ("binding", (API,))]
    ends = [there for _, there in seen[2:]]
    assert ends[:2] == [(API, REG), (API,)], "the registration's goes first"
    assert (REG,) not in ends
    assert ends[-1] == ()


@pytest.mark.parametrize("last", ["dra.sock", f"{DRIVER}-reg.sock"])
async def test_a_plugin_that_is_cancelled_while_it_makes_a_socket_ends(kubelet_dir: Path, last: str) -> None:
    """It served for ever (found by a history): trio drops what a task that is being cancelled has started, and a
    shielded one is never cancelled."""
    made: list[BoundListener] = []

    def bind(path: str, *, mode: int = 0o660, evict: Collection[Owner] = ()) -> BoundListener:
        made.append(bind_unix(path, mode=mode, evict=evict))
        if os.path.basename(path) == last:
            scope.cancel()
        return made[-1]

    async def end() -> None:
        """What is shielded ends with its listener only; the second one is made after the first one has ended."""
        for number in range(2):
            await trio.sleep(WITHIN_S / 2)
            hangs.append(made[number])
            await made[number].aclose()

    hangs: list[BoundListener] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        with trio.CancelScope() as scope:
            async with serving(kubelet_dir, io=replace(plugin_io_of_the_node(), bind=bind)):
                await trio.sleep_forever()
        nursery.cancel_scope.cancel()
    assert not hangs
    paths = socket_paths(str(kubelet_dir), DRIVER, None)
    assert not any(map(os.path.exists, (paths.api, paths.registration)))


async def test_a_kubelet_that_still_calls_after_the_withdrawal_is_answered(kubelet_dir: Path) -> None:
    """It acts on a removed socket only each second; a refused prepare is tried again after 60 s."""
    async with serving(kubelet_dir) as served:
        with served.dialled() as channel:
            stub = plugin(channel)["NodePrepareResources"]
            await served.call(stub, prepare_request(CLAIM))  # it is connected
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.endpoint.withdraw, limits.DRAIN_S)
                with trio.fail_after(WITHIN_S):
                    while served.registration.exists():  # noqa: ASYNC110 nothing tells of it
                        await trio.sleep(0.001)
                answer = await served.call(stub, prepare_request(CLAIM))
                assert not answer.claims["uid-a"].error


async def test_a_withdrawal_ends_when_kubelet_has_disconnected(kubelet_dir: Path) -> None:
    async with serving(kubelet_dir) as served:
        with trio.fail_after(limits.DEREGISTERED_S / 2):
            await served.endpoint.withdraw(limits.DRAIN_S)


# --- sockets and directories that somebody else removes --------------------------------------------------------


async def mended(served: Plugin, remove: Callable[[], object]) -> None:
    """While it is watched for, something is removed."""
    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.endpoint.lost)
            await trio.testing.wait_all_tasks_blocked(0.01)
            remove()
        await served.endpoint.mend()


@pytest.fixture
def by_inotify_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dra_plugin, "PLUGIN_SOCKETS_CHECK_S", 3600.0)


async def test_directories_are_made_if_absent(kubelet_dir: Path) -> None:
    async with serving(kubelet_dir / "not" / "there" / "yet") as served:
        assert (await get_info(served)).name == DRIVER


@pytest.mark.usefixtures("by_inotify_alone")
@pytest.mark.parametrize("gone", ["api", "registration"])
async def test_a_removed_socket_is_made_again_and_calls_in_flight_go_on(kubelet_dir: Path, gone: str) -> None:
    core = Core(hold=trio.Event())
    async with serving(kubelet_dir, core) as served:
        with served.dialled() as channel:
            waiting = plugin(channel)["NodePrepareResources"].future(prepare_request(CLAIM), timeout=WITHIN_S)
            await core.until(lambda: len(core.asked) == 1)
            await mended(served, lambda: os.unlink(getattr(served, gone)))
            assert (await get_info(served)).name == DRIVER
            with served.dialled() as fresh:
                second = plugin(fresh)["NodePrepareResources"].future(prepare_request(CLAIM))
                await core.until(lambda: len(core.asked) == 2)
                core.hold.set()  # type: ignore[union-attr]
                for call in (waiting, second):
                    answer = await served.call(lambda _, timeout, call=call: call.result(timeout), None)
                    assert not answer.claims["uid-a"].error
    assert not served.api.exists()
    assert not served.registration.exists()


async def test_a_directory_that_is_made_anew_gets_its_socket_again(kubelet_dir: Path) -> None:
    """An operator clears plugins_registry; a node's provisioning removes both."""
    async with serving(kubelet_dir) as served:
        await mended(served, lambda: shutil.rmtree(kubelet_dir / "plugins_registry"))
        assert (await get_info(served)).name == DRIVER
        shutil.rmtree(kubelet_dir / "plugins_registry")
        await mended(served, lambda: shutil.rmtree(kubelet_dir / "plugins"))
        assert (await get_info(served)).name == DRIVER
        with served.dialled() as channel:
            answer = await served.call(plugin(channel)["NodePrepareResources"], prepare_request(CLAIM))
            assert not answer.claims["uid-a"].error


async def test_without_inotify_a_removed_socket_is_found_by_looking(
    kubelet_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(path: str) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(dra_plugin, "PLUGIN_SOCKETS_CHECK_S", 0.02)
    io = replace(plugin_io_of_the_node(), watch=none_left)
    async with serving(kubelet_dir, io=io) as served:
        await mended(served, lambda: os.unlink(served.registration))
        assert (await get_info(served)).name == DRIVER


async def test_what_cannot_be_made_is_said_in_a_sentence(kubelet_dir: Path) -> None:
    (kubelet_dir / "plugins").write_text("a file")
    with pytest.raises(
        KubeletError, match=r"cannot make the directory .*/plugins/gpu\.nvidia\.com .*kubelet-dir"
    ):
        async with serving(kubelet_dir):
            pytest.fail("it does not serve")
    (kubelet_dir / "plugins").unlink()
    (kubelet_dir / "plugins_registry" / REG).mkdir(parents=True)
    with pytest.raises(KubeletError, match="is not a socket"):
        async with serving(kubelet_dir):
            pytest.fail("it does not serve")
    assert not (kubelet_dir / "plugins" / DRIVER / API).exists(), "the API's went again"


async def test_an_error_of_the_body_is_raised_as_it_is(kubelet_dir: Path) -> None:
    with pytest.raises(KubeletError, match="planted"):
        async with serving(kubelet_dir) as served:
            raise KubeletError("planted")
    assert not served.registration.exists()


# --- instances --------------------------------------------------------------------------------------------------


async def test_two_instances_serve_beside_each_other_at_two_paths(kubelet_dir: Path) -> None:
    """Two at one path are refused by kubelet ("endpoint … already registered")."""
    async with serving(kubelet_dir, instance=POD_UID) as old:
        async with serving(kubelet_dir, instance="b2") as new:
            endpoints = {(await get_info(served)).endpoint for served in (old, new)}
            assert endpoints == {
                str(kubelet_dir / "plugins" / DRIVER / f"dra-{name}.sock") for name in (POD_UID, "b2")
            }
        assert old.registration.name == f"{DRIVER}-{POD_UID}-reg.sock"
        assert (await get_info(old)).name == DRIVER, "the end of one is nothing to the other"


async def test_a_second_daemon_without_an_instance_does_not_take_the_firsts_place(kubelet_dir: Path) -> None:
    async with serving(kubelet_dir) as first:
        with pytest.raises(KubeletError, match="two plugins cannot share it"):
            async with serving(kubelet_dir):
                pytest.fail("it does not serve")
        assert (await get_info(first)).name == DRIVER


# --- sockets of instances that were killed ------------------------------------------------------------------------

DEAD_UID: Final = "0b8f2a11-6d3c-4e0f-9f7e-5a4b3c2d1e0f"
STATIC_UID: Final = "0b8f2a116d3c4e0f9f7e5a4b3c2d1e0f"


def dead_socket(path: Path) -> Path:
    """As a process that was killed leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    return path


async def test_sockets_of_killed_instances_are_removed_when_one_serves(kubelet_dir: Path) -> None:
    """Kubelet dials what is in its registry for ever."""
    registry, own = kubelet_dir / "plugins_registry", kubelet_dir / "plugins" / DRIVER
    dead = [
        dead_socket(registry / f"{DRIVER}-{DEAD_UID}-reg.sock"),
        dead_socket(registry / f"{DRIVER}-{STATIC_UID}-reg.sock"),
        dead_socket(own / f"dra-{DEAD_UID}.sock"),
    ]
    async with serving(kubelet_dir, instance=POD_UID) as served:
        assert [path for path in dead if path.exists()] == []
        assert (await get_info(served)).name == DRIVER


async def test_what_is_not_a_dead_socket_of_this_driver_is_left(kubelet_dir: Path) -> None:
    registry = kubelet_dir / "plugins_registry"
    others = [
        dead_socket(registry / f"{DRIVER}-csi-{DEAD_UID}-reg.sock"),
        dead_socket(registry / f"compute-domain.nvidia.com-{DEAD_UID}-reg.sock"),
        dead_socket(registry / f"{DRIVER}-reg.sock"),
        registry / f"{DRIVER}-{STATIC_UID}-reg.sock",
    ]
    others[-1].write_text("no socket")
    async with serving(kubelet_dir, instance=DEAD_UID) as old, serving(kubelet_dir, instance=POD_UID):
        assert [path.name for path in others if not path.exists()] == []
        assert (await get_info(old)).name == DRIVER, "the one that is being replaced answers until its end"


async def test_a_hanging_instance_with_a_full_backlog_keeps_its_socket(kubelet_dir: Path) -> None:
    path = kubelet_dir / "plugins_registry" / f"{DRIVER}-{DEAD_UID}-reg.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as hangs, socket.socket(socket.AF_UNIX) as waiting:
        hangs.bind(str(path))
        hangs.listen(0)
        waiting.connect(str(path))
        async with serving(kubelet_dir, instance=POD_UID):
            assert path.exists()


def test_names_that_the_kernel_does_not_take_have_a_digest() -> None:
    driver = "gpu." + "x" * 50 + ".example"
    short, long = (
        socket_paths("/var/lib/kubelet", DRIVER, POD_UID),
        socket_paths("/var/lib/kubelet", driver, POD_UID),
    )
    assert POD_UID in short.registration
    assert len(long.registration) <= limits.SOCKET_PATH_MAX_BYTES
    assert long.registration.endswith("-reg.sock")
    assert long.registration != socket_paths("/var/lib/kubelet", driver, POD_UID[::-1]).registration


def test_no_name_of_ours_begins_with_a_dot() -> None:
    """Kubelet ignores those."""
    for instance in (None, POD_UID):
        paths = socket_paths("/var/lib/kubelet", DRIVER, instance)
        assert not os.path.basename(paths.registration).startswith(".")
