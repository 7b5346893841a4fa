"""The checkpoint keeper beside a daemon that still serves."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import trio

from gpuactors.actors import checkpoint_keeper
from gpuactors.acts.blocking_runner import StoredCheckpoint, StoredFiles
from gpuactors.acts.checkpoint import CheckpointFile
from gpuactors.acts.disk import RealDisk
from gpuactors.acts.files import ClaimFiles
from gpuactors.acts.theirs import TheirClaims
from gpuactors.concurrency.latest import Latest
from gpuactors.core.claims.cdi import device_name
from gpuactors.core.claims.checkpoint import Checkpoint, Origin, Restored
from gpuactors.core.claims.files import ClaimContents, FoundFiles
from gpuactors.core.claims.outputs import CheckpointWanted, DiskWanted
from gpuactors.core.events import Event
from gpuactors.core.events.claims import CheckpointRead, CheckpointRefused, CheckpointWritten
from gpuactors.core.state.claims import gpus_of
from gpuactors.core.values.claim import ClaimName, ClaimsOf, ClaimUid, Json
from gpuactors.core.values.domain import DomainUid
from gpuactors.ports.errors import StateFileError
from gpuactors_simulation.memory.acts import NoLock, inline

PATIENCE_S = 3600.0
UID = ClaimUid("8b3f0c52-0000-4000-8000-000000000001")


@dataclass
class Store:
    """An empty checkpoint, and the files of a claim, as if its intent was written since. Implements
    `ports.claims.CheckpointStore` and `ports.claims.ClaimFileStore`."""

    origin: Origin = Origin.FOUND
    files: Mapping[ClaimUid, FoundFiles] = field(default_factory=lambda: {UID: FoundFiles.of(UID, [], [])})
    owned: list[bool] = field(default_factory=list)
    removed: list[ClaimUid] = field(default_factory=list)
    cleared: int = 0
    stuck: tuple[str, ...] = ()
    """What is said of the directories that cannot be removed, and of the files of each claim."""
    before: Checkpoint = field(default_factory=Checkpoint)
    written: list[Checkpoint] = field(default_factory=list)

    async def read(self, *, owns: bool) -> Restored:
        self.owned.append(owns)
        return Restored(self.before, self.origin, "")

    async def found(self, *, owns: bool) -> Mapping[ClaimUid, FoundFiles]:
        self.owned.append(owns)
        return self.files

    async def remove(self, uid: ClaimUid, directories: Iterable[str] = ()) -> None:
        self.removed.append(uid)
        for sentence in self.stuck:
            raise StateFileError(sentence)

    async def clear_mounted(self, kept: Collection[DomainUid] | None) -> tuple[str, ...]:
        self.cleared += 1
        return self.stuck

    async def write(self, contents: Checkpoint | ClaimContents) -> None:
        assert isinstance(contents, Checkpoint), "no claim's files are to be written"
        self.written.append(contents)


async def test_files_of_no_claim_are_left_while_another_daemon_serves(autojump_clock: object) -> None:
    """It may have written them since the checkpoint was read, and would say that the claim is prepared."""
    store, wanted = Store(), Latest(DiskWanted(load=1))
    post, inbox = trio.open_memory_channel[Event](10)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint_keeper.run, wanted.subscribe(), store, store, post, ClaimsOf.GPUS)
            assert isinstance(await inbox.receive(), CheckpointRead)
            assert (store.owned, store.removed) == ([False, False], [])
            wanted.set(DiskWanted(load=2))
            assert isinstance(await inbox.receive(), CheckpointRead)
            assert (store.owned, store.removed) == ([False, False, True, True], [UID])
            nursery.cancel_scope.cancel()


LOST = ClaimUid("8b3f0c52-0000-4000-8000-000000000002")


@dataclass
class NewerStore(Store):
    """Whose checkpoint a newer daemon has written."""

    async def read(self, *, owns: bool) -> Restored:
        raise StateFileError("it is of version 9")


async def test_a_checkpoint_that_may_not_be_used_comes_with_what_the_files_name(
    autojump_clock: object,
) -> None:
    """Nothing is removed: half of a claim's files may be all that says that it has a GPU."""
    metadata = {"metadata": {"namespace": "default", "name": "one", "uid": LOST}}
    cdi: Json = {"devices": ({"name": device_name(LOST, "gpu-0000-23-00-0")},)}
    store = NewerStore()
    store.files = {LOST: FoundFiles.of(LOST, [cdi], [metadata]), **store.files}
    wanted = Latest(DiskWanted(load=2))
    post, inbox = trio.open_memory_channel[Event](10)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint_keeper.run, wanted.subscribe(), store, store, post, ClaimsOf.GPUS)
            refused = await inbox.receive()
            assert isinstance(refused, CheckpointRefused)
            assert refused.reason == "it is of version 9"
            (entry,) = refused.entries
            assert entry.name == ClaimName("default", "one", LOST)
            assert [gpu.key for gpu in gpus_of(entry).gpus] == ["0000:23:00.0"]
            assert store.removed == []
            nursery.cancel_scope.cancel()


async def test_mounted_directories_are_removed_by_the_daemon_that_serves(autojump_clock: object) -> None:
    """Which ones `restoration` decides; they are not another daemon's, which serves."""
    store, wanted = Store(Origin.OTHER_BOOT), Latest(DiskWanted(load=1))
    post, inbox = trio.open_memory_channel[Event](10)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint_keeper.run, wanted.subscribe(), store, store, post, ClaimsOf.GPUS)
            assert isinstance(await inbox.receive(), CheckpointRead)
            assert store.cleared == 0
            wanted.set(DiskWanted(load=2))
            assert isinstance(await inbox.receive(), CheckpointRead)
            assert store.cleared == 1
            nursery.cancel_scope.cancel()


async def test_what_is_written_goes_on_from_what_was_read(autojump_clock: object) -> None:
    """A field of a newer daemon stays in the file."""
    store = Store(files={}, before=Checkpoint(unknown={"newer": 1}))
    wanted = Latest(DiskWanted(load=2))
    post, inbox = trio.open_memory_channel[Event](10)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint_keeper.run, wanted.subscribe(), store, store, post, ClaimsOf.GPUS)
            assert isinstance(await inbox.receive(), CheckpointRead)
            wanted.set(DiskWanted(load=2, checkpoint=CheckpointWanted(1, (), ())))
            assert await inbox.receive() == CheckpointWritten(1, ClaimsOf.GPUS)
            assert store.written == [Checkpoint(unknown={"newer": 1})]
            nursery.cancel_scope.cancel()


async def test_what_cannot_be_removed_at_the_start_stops_no_claim_and_is_named(
    autojump_clock: object,
) -> None:
    """Else a directory that somebody made immutable, or mounted over, ends every claim of the node, after each boot."""
    store = Store(origin=Origin.OTHER_BOOT, stuck=("the directory /x is stuck",))
    wanted = Latest(DiskWanted(load=2))
    post, inbox = trio.open_memory_channel[Event](10)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                checkpoint_keeper.run, wanted.subscribe(), store, store, post, ClaimsOf.DOMAINS
            )
            read = await inbox.receive()
            nursery.cancel_scope.cancel()
    assert isinstance(read, CheckpointRead)
    assert (store.removed, store.cleared) == ([UID], 1)
    assert read.warning == "the directory /x is stuck; the directory /x is stuck", (
        "the files' and the directory's"
    )


DAEMON_CLAIM = "8b3f0c52-0000-4000-8000-000000000004"
LIVE, ENDED, MOUNTED = (f"8b3f0c52-0000-4000-8000-00000000000{n}" for n in "abc")
"""A domain with a claim that NVIDIA's driver has prepared, one without any, and one that only a CDI file names."""


async def test_directories_of_domains_that_ended_under_nvidias_driver_are_removed(tmp_path: Path) -> None:
    """Files as its driver leaves them when it goes: no sweep of its own follows, which comes each 10 minutes."""
    plugin, cdi = tmp_path / "compute-domain.nvidia.com", tmp_path / "cdi"
    for domain in (LIVE, ENDED, MOUNTED):
        (plugin / "domains" / domain).mkdir(parents=True)
        for name in ("imexd.cfg.tmpl", "imexd.cfg", "nodes.cfg"):
            (plugin / "domains" / domain / name).write_text("x")
    cdi.mkdir()
    (cdi / f"k8s.compute-domain.nvidia.com-claim_{LOST}.yaml").write_text(f"hostPath: /d/domains/{MOUNTED}\n")
    device = {"Requests": ["daemon"], "PoolName": "node-1", "DeviceName": "daemon-0", "CDIDeviceIDs": ["c"]}
    prepared = {
        "devices": [{"channel": None, "daemon": {"info": {"id": 0}, "device": device}}],
        "configState": {"Type": "daemon", "ComputeDomain": LIVE},
    }
    claim = {
        "checkpointState": "PrepareCompleted",
        "preparedDevices": [prepared],
        "name": "one",
        "namespace": "default",
    }
    v2 = {"checksum": 2, "preparedClaims": {DAEMON_CLAIM: claim}, "nodeBootID": "b1"}
    (plugin / "checkpoint.json").write_text(json.dumps({"checksum": 1, "v1": {}, "v2": v2}))

    disk, driver = RealDisk(), "compute-domain.nvidia.com"
    theirs = TheirClaims(disk, driver=driver, cdi_dir=str(cdi), places=None)
    store = StoredCheckpoint(CheckpointFile(disk, str(plugin), "b1", theirs), inline, NoLock())
    files = StoredFiles(
        ClaimFiles(disk, driver=driver, cdi_dir=str(cdi), plugin_dir=str(plugin)), inline, NoLock()
    )
    wanted = Latest(DiskWanted(load=2))
    post, inbox = trio.open_memory_channel[Event](10)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                checkpoint_keeper.run, wanted.subscribe(), store, files, post, ClaimsOf.DOMAINS
            )
            read = await inbox.receive()
            nursery.cancel_scope.cancel()
    assert isinstance(read, CheckpointRead)
    assert ([entry.name.uid for entry in read.entries], read.warning) == ([DAEMON_CLAIM], "")
    assert sorted(path.name for path in (plugin / "domains").iterdir()) == [LIVE, MOUNTED]


@dataclass
class UnclearableStore(Store):
    """Of whose directories nobody can say which are mounted."""

    async def clear_mounted(self, kept: Collection[DomainUid] | None) -> tuple[str, ...]:
        raise StateFileError("the CDI files cannot be read")


async def test_directories_that_stay_are_said_and_end_nothing(autojump_clock: object) -> None:
    store, wanted = UnclearableStore(Origin.OTHER_BOOT), Latest(DiskWanted(load=2))
    post, inbox = trio.open_memory_channel[Event](10)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint_keeper.run, wanted.subscribe(), store, store, post, ClaimsOf.GPUS)
            read = await inbox.receive()
            assert isinstance(read, CheckpointRead)
            assert read.warning == "the CDI files cannot be read"
            nursery.cancel_scope.cancel()
