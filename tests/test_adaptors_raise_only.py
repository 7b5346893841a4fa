"""Each call that a real adaptor makes to the system raises each error: it answers, or raises what its port says, leaves
nothing open, and works again afterwards. On real files, sockets and processes."""

from __future__ import annotations

import errno
import os
import signal
import struct
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import httpcore
import pytest
import trio
from inotify_simple import INotify

from gpuactors.acts import cdi_watch, disk, modprobe, state_lock
from gpuactors.acts.blocking_runner import StoredCheckpoint, StoredFiles
from gpuactors.acts.checkpoint import CheckpointFile
from gpuactors.acts.files import ClaimFiles
from gpuactors.acts.modprobe import Modprobe, ModprobeError
from gpuactors.acts.persistenced import Persistenced, PersistenceError
from gpuactors.acts.state_lock import StateLock
from gpuactors.acts.theirs import TheirClaims
from gpuactors.control.dead_signs import dead_signs_json
from gpuactors.control.partition_intents import partition_intents_json
from gpuactors.control.served import ServedFile
from gpuactors.control.vgpu_types import vgpu_types_json
from gpuactors.core.claims import cdi
from gpuactors.core.claims.checkpoint import Checkpoint
from gpuactors.core.claims.files import ClaimContents
from gpuactors.core.kinds.sets import KnownSets
from gpuactors.core.values.claim import ClaimName, ClaimUid
from gpuactors.core.values.dead_signs import DeadSign
from gpuactors.core.values.model import DeviceKey, PciAddress, ResourceName, Sign
from gpuactors.core.values.partition import Goal, Intent, PartitionId
from gpuactors.core.values.vgpu import CardTypes
from gpuactors.host import asked, boot, imex, management, modules, nvidia, places
from gpuactors.host.asked import AskedProgram
from gpuactors.host.partition_command import PartitionCommand
from gpuactors.host.pci_ids import SHIPPED, PciIds
from gpuactors.host.places import Places
from gpuactors.host.root import HostRoot
from gpuactors.host.sets_file import SetsFile
from gpuactors.kube.client import ApiClient, Call
from gpuactors.kube.config import FileAccess, Server, in_cluster
from gpuactors.observe.nfd import NfdFile
from gpuactors.ports.errors import HostError, HostShortError, PortError, StateFileError
from gpuactors.ports.kube import ApiError
from gpuactors.process import plain_files
from gpuactors_simulation.host.imex import ImexTree
from gpuactors_simulation.memory.acts import inline
from tests.acts.test_persistenced import accepted
from tests.fuzz_decoders.decoder import Stream, sentence
from tests.support.descriptors import open_files
from tests.support.inline_host import InlineImex
from tests.support.nth_call import NUMBERS, Others, every_failure
from tests.support.patience import patient

PATIENCE_S: Final = patient(60.0)
CLAIM: Final = ClaimName("default", "gpus", ClaimUid("0f1e2d3c-0000-4000-8000-000000000001"))

Use = Callable[[], Awaitable[object]]


def struck(
    use: Use, modules_of: dict[ModuleType, Others], allowed: tuple[type[Exception], ...], below: Path
) -> None:
    """`use` under every failure of every call that these modules make."""

    async def tried(failing: Callable[[], Any]) -> None:
        with trio.fail_after(PATIENCE_S), failing() as nth:
            try:
                await use()
            except allowed as error:
                sentence(error)
            except Exception as error:
                error.add_note(f"calls until then: {nth.made}")
                raise

    for failing in every_failure(modules_of):
        trio.run(tried, failing)
        assert open_files(below) == []


# --- files ----------------------------------------------------------------------------------------------------------


def test_plain_files_raise_oserror_and_leave_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    async def use() -> None:
        await trio.lowlevel.checkpoint()
        assert plain_files.read_plain(path, 10) in (b"old", b"new")
        plain_files.replace_own(path, b"new", 0o600, durable=True)

    struck(use, {plain_files: {}}, (OSError,), tmp_path)
    assert path.read_bytes() == b"new"


def test_served_resources_raise_their_own_error(tmp_path: Path) -> None:
    served, models = ServedFile(str(tmp_path)), {ResourceName("n/H100"): frozenset({"10de:2330"})}

    async def use() -> None:
        await served.write(models)
        assert await served.read() in (models, {}), "none, where there is no such file"

    struck(use, {plain_files: {}}, (StateFileError,), tmp_path)


def test_the_names_of_vgpu_types_raise_their_own_error(tmp_path: Path) -> None:
    file, types = (
        vgpu_types_json(str(tmp_path), "boot"),
        {PciAddress("0000:3b:00.0"): CardTypes(7, {1147: ("A",)})},
    )

    async def use() -> None:
        await file.write(types)
        assert await file.read() in (types, {}), "none, where there is no such file"

    struck(use, {plain_files: {}}, (StateFileError,), tmp_path)


def test_the_signs_of_dead_functions_raise_their_own_error(tmp_path: Path) -> None:
    file, signs = (
        dead_signs_json(str(tmp_path), "boot"),
        {PciAddress("0000:3b:00.0"): DeadSign(7, Sign.SILENT)},
    )

    async def use() -> None:
        await file.write(signs)
        assert await file.read() in (signs, {}), "none, where there is no such file"

    struck(use, {plain_files: {}}, (StateFileError,), tmp_path)


def test_the_sets_file_raises_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "sets.json").write_text("{}")
    file = SetsFile(tmp_path / "sets.json")

    async def use() -> None:
        assert await file.read() == KnownSets()

    struck(use, {plain_files: {}}, (HostError,), tmp_path)


def test_the_partition_command_raises_its_own_error(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho '{\"partitionInfo\": []}'\n")
    program.chmod(0o755)

    async def use() -> None:
        # A new one each time: the killed program of a failure may not have ended when the next use begins.
        assert await PartitionCommand(program, deadline_s=patient(5.0)).read() == KnownSets()

    struck(use, {asked: {"subprocess": ("Popen",)}}, (HostError,), tmp_path)


def test_the_intents_of_partitions_raise_their_own_error(tmp_path: Path) -> None:
    file = partition_intents_json(str(tmp_path), "boot")
    intents = (Intent(PartitionId("7"), frozenset({DeviceKey("0000:3b:00.0")}), Goal.ACTIVATE),)

    async def use() -> None:
        await file.write(intents)
        assert await file.read() in (intents, ()), "none, where there is no such file"

    struck(use, {plain_files: {}}, (StateFileError,), tmp_path)


def test_the_feature_file_raises_its_own_error(tmp_path: Path) -> None:
    file = NfdFile(tmp_path / "gpuactors")
    struck(lambda: file.write({"a": "b"}, 0.0), {plain_files: {}}, (StateFileError,), tmp_path)


@pytest.mark.parametrize("owns", [False, True])
def test_the_lock_of_the_state_raises_its_own_error(tmp_path: Path, owns: bool) -> None:
    async def use() -> None:
        await trio.lowlevel.checkpoint()
        lock = StateLock(str(tmp_path), wait_s=0.0)
        with lock.reading(owns=True):
            pass
        lock.taken()
        with lock.writing() if owns else lock.reading(owns=False):
            pass

    struck(use, {state_lock: {"fcntl": ("flock",)}}, (StateFileError,), tmp_path)


def test_the_checkpoint_and_the_files_of_claims_raise_their_own_error(tmp_path: Path) -> None:
    real = disk.RealDisk()
    theirs = TheirClaims(real, driver="gpu.nvidia.com", cdi_dir=str(tmp_path / "cdi"), places=None)
    lock = StateLock(str(tmp_path / "p"), wait_s=0.0)
    contents = ClaimContents(CLAIM, cdi.device_file("gpu.nvidia.com", CLAIM, ()), ())

    async def use() -> None:
        # Made for each use: they hold their directories.
        checkpoint = CheckpointFile(real, str(tmp_path / "p"), "boot", theirs)
        files = ClaimFiles(
            real, driver="gpu.nvidia.com", cdi_dir=str(tmp_path / "cdi"), plugin_dir=str(tmp_path / "p")
        )
        stored, kept = StoredCheckpoint(checkpoint, inline, lock), StoredFiles(files, inline, lock)
        await stored.read(owns=True)
        await stored.write(Checkpoint())
        await kept.found(owns=True)
        await kept.write(contents)
        await kept.remove(CLAIM.uid)
        await kept.clear_mounted(None)

    struck(use, {disk: {}, plain_files: {}}, (StateFileError,), tmp_path)


GPU: Final = PciAddress("0000:23:00.0")
CLUSTER: Final = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}

OF_THE_HOST: Final[dict[str, Callable[[Path], object]]] = {
    "imex": lambda d: InlineImex(HostRoot(str(d))).read(),
    "management": lambda d: management.ManagementDevice("auto", str(d / "cdi")).find(),
    "uuid": lambda d: Places(HostRoot(str(d))).of_uuid("GPU-1"),
    "group": lambda d: Places(HostRoot(str(d))).of_node("/dev/vfio/51"),
    "cdev": lambda d: Places(HostRoot(str(d))).of_node("/dev/vfio/devices/vfio3"),
    "boot": lambda d: (boot.boot_id(HostRoot(str(d))), boot.command_line(HostRoot(str(d)))),
    "pci.ids": lambda _: PciIds.open(SHIPPED),
    "credentials": lambda d: in_cluster(CLUSTER, d),
}


@pytest.mark.parametrize("name", OF_THE_HOST)
def test_what_is_read_of_the_host_raises_its_own_error(name: str, tmp_path: Path) -> None:
    tree = ImexTree(tmp_path)
    tree.load()
    tree.join()
    for path, text in (
        ("cdi/a.json", '{"kind": "management.nvidia.com/gpu", "devices": [{"name": "all"}]}'),
        (f"proc/driver/nvidia/gpus/{GPU}/information", "GPU UUID: GPU-????????\n"),
        (f"sys/kernel/iommu_groups/51/devices/{GPU}", ""),
        (f"sys/bus/pci/devices/{GPU}/class", "0x030200\n"),
        ("token", "t"),
        ("ca.crt", "c"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    async def use() -> None:
        await trio.lowlevel.checkpoint()
        found = OF_THE_HOST[name](tmp_path)
        if isinstance(found, Awaitable):
            await found

    modules_of: dict[ModuleType, Others] = {
        m: {} for m in (imex, management, places, nvidia, boot, plain_files)
    }
    struck(use, modules_of, (PortError,), tmp_path)


# --- programs and sockets -------------------------------------------------------------------------------------------


def test_a_program_that_is_asked_raises_oserror(tmp_path: Path) -> None:
    async def use() -> None:
        await AskedProgram(("/bin/true",), "test", PATIENCE_S).ask()

    struck(use, {asked: {"subprocess": ("Popen",)}}, (OSError,), tmp_path)


async def test_a_program_that_cannot_be_waited_for_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    program = AskedProgram(("/bin/sleep", "3600"), "test", PATIENCE_S)
    monkeypatch.setattr(os, "pidfd_open", none_left)
    with trio.fail_after(PATIENCE_S), pytest.raises(OSError, match="Too many open files"):
        await program.ask()
    assert program._left is not None
    assert await trio.to_thread.run_sync(program._left.wait) == -signal.SIGKILL


def test_modprobe_raises_its_own_error(tmp_path: Path) -> None:
    path = tmp_path / "proc/sys/kernel/modprobe"
    path.parent.mkdir(parents=True)
    path.write_text("/sbin/modprobe\n")
    loaded = tmp_path / "sys/bus/pci/drivers/vfio-pci"

    async def use() -> None:
        tried = Modprobe(HostRoot(str(tmp_path)), inline, deadline_s=PATIENCE_S)
        tried._programs["vfio-pci"] = AskedProgram(("/bin/mkdir", "-p", str(loaded)), "modprobe", PATIENCE_S)
        assert await tried.load("vfio-pci") == "vfio-pci"
        loaded.rmdir()

    loaded.parent.mkdir(parents=True)
    modules_of: dict[ModuleType, Others] = {asked: {"subprocess": ("Popen",)}, modprobe: {}, modules: {}}
    struck(use, modules_of, (ModprobeError, HostShortError), tmp_path)


class Dialled:
    """A connection that breaks at the call of this number: a stream of trio's makes that of each `OSError`."""

    def __init__(self, stream: Any, fails_at: int) -> None:
        self._stream = stream
        self._left = fails_at

    def _call(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise trio.BrokenResourceError("x")

    async def send_all(self, data: bytes) -> None:
        self._call()
        await self._stream.send_all(data)

    async def receive_some(self, bytes_max: int) -> bytes:
        self._call()
        return bytes(await self._stream.receive_some(bytes_max))

    async def __aenter__(self) -> Dialled:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_persistenced_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def outcome(dial: Callable[[str], Awaitable[Any]]) -> bool:
        monkeypatch.setattr(trio, "open_unix_socket", dial)
        ours = Persistenced(HostRoot("/nowhere"), "/run/nvidia/driver", deadline_s=PATIENCE_S)
        with trio.fail_after(PATIENCE_S):
            return await ours.set(PciAddress("0000:23:00.0"), on=True)

    for number in NUMBERS:

        async def refused(_: str, number: int = number) -> Any:
            raise OSError(number, os.strerror(number))

        if number == errno.ENOENT:
            assert not await outcome(refused), "there is none"
            continue
        with pytest.raises(PersistenceError):
            await outcome(refused)
    for fails_at in range(4):  # the call, the answer's head, the answer

        async def breaking(_: str, fails_at: int = fails_at) -> Any:
            return Dialled(Stream(accepted(0)(struct.pack(">I", 1))), fails_at)

        if fails_at == 3:
            assert await outcome(breaking)
            continue
        with pytest.raises(PersistenceError):
            await outcome(breaking)


# --- inotify --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("where", ["INotify", "add_watch", "read"])
async def test_the_watch_of_the_cdi_files_never_ends(
    tmp_path: Path, number: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cdi_watch, "CDI_DIR_RETRY_S", 0.01)
    strikes = [OSError(number, os.strerror(number))]

    class Failing(INotify):  # type: ignore[misc]
        def __init__(self, *args: object, **kwargs: object) -> None:
            self._strike("INotify")
            super().__init__(*args, **kwargs)

        def _strike(self, at: str) -> None:
            if at == where and strikes:
                raise strikes.pop()

        def add_watch(self, *args: object, **kwargs: object) -> object:
            self._strike("add_watch")
            return super().add_watch(*args, **kwargs)

        def read(self, *args: object, **kwargs: object) -> object:
            self._strike("read")
            return super().read(*args, **kwargs)

    monkeypatch.setattr(cdi_watch, "INotify", Failing)
    with trio.fail_after(PATIENCE_S):
        async with aclosing(cdi_watch.touches(str(tmp_path), {"ours": ClaimUid("uid")}.get)) as touches:
            await anext(touches)
            for _ in range(2):
                (tmp_path / "ours").write_text("x")
                await anext(touches)
    assert not strikes


# --- the API server -------------------------------------------------------------------------------------------------

CALLS_MAX: Final = 20
ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe\nlo"


class Network(httpcore.AsyncNetworkBackend):
    """A server whose answer comes in two pieces; the call of this number raises. 0 is the connection."""

    def __init__(self, fails_at: int, error: Exception) -> None:
        self._left = fails_at
        self._error = error
        self.calls = 0

    def _call(self) -> None:
        self.calls += 1
        if self.calls == self._left + 1:
            raise self._error

    async def connect_tcp(self, *_: object, **__: object) -> httpcore.AsyncNetworkStream:
        self._call()
        return Connection(self._call)


class Connection(httpcore.AsyncNetworkStream):
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._left = [ANSWER[:-2], ANSWER[-2:]]

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        self._call()
        return self._left.pop(0) if self._left else b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await trio.lowlevel.checkpoint()
        self._call()

    async def aclose(self) -> None:
        self._call()

    def get_extra_info(self, info: str) -> Any:
        return None


FAILURES: Final = (
    *(OSError(n, os.strerror(n)) for n in NUMBERS),
    *(
        kind("x")
        for kind in (httpcore.ReadError, httpcore.WriteError, httpcore.ConnectError, httpcore.ReadTimeout)
    ),
    trio.BrokenResourceError("x"),
    trio.ClosedResourceError("x"),
)


async def asked_of(client: ApiClient) -> None:
    assert await client.ask(Call("ask", "GET", "/")) == b"he\nlo"


async def lines_of(client: ApiClient) -> None:
    async with client.lines(Call("watch", "GET", "/"), PATIENCE_S) as lines:
        assert [line async for line in lines] == [b"he"]


@pytest.mark.parametrize("use", [asked_of, lines_of])
@pytest.mark.parametrize("error", FAILURES, ids=repr)
async def test_a_request_raises_errors_of_the_api_server_only(
    use: Callable[[ApiClient], Awaitable[None]], error: Exception
) -> None:
    with trio.fail_after(PATIENCE_S):
        for fails_at in range(CALLS_MAX):
            network = Network(fails_at, error)
            client = ApiClient(FileAccess(Server("http", "192.0.2.1", 1)), network)
            try:
                await use(client)
            except ApiError as exc:
                sentence(exc)
            if network.calls <= fails_at:
                assert fails_at > 3, "the connection, the request, two pieces of the answer"
                return
    raise AssertionError("it makes calls without end")
