"""The checkpoint keeper beside a daemon that still serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pytest
import trio

from gpuactors.actors import checkpoint_keeper
from gpuactors.concurrency.latest import Latest
from gpuactors.core.claims.cdi import device_name
from gpuactors.core.claims.checkpoint import Checkpoint, Origin, Restored, Theirs
from gpuactors.core.claims.files import ClaimContents, FoundFiles
from gpuactors.core.claims.outputs import CheckpointWanted, ClaimsWanted
from gpuactors.core.events import CheckpointRead, CheckpointRefused, CheckpointWritten, Event
from gpuactors.core.state.claims import StoredEntry
from gpuactors.core.values.claim import Claim, ClaimName, ClaimUid, Json
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.ports.node import StateFileError

PATIENCE_S = 3600.0
UID = ClaimUid("8b3f0c52-0000-4000-8000-000000000001")


@dataclass
class Store:
    """An empty checkpoint, and the files of a claim, as if its intent was written since. Implements
    `ports.node.CheckpointStore` and `ports.node.ClaimFileStore`."""

    origin: Origin = Origin.FOUND
    files: tuple[FoundFiles, ...] = (FoundFiles.of(UID, False, (), [], []),)
    owned: list[bool] = field(default_factory=list)
    removed: list[ClaimUid] = field(default_factory=list)
    cleared: int = 0
    theirs: Theirs | None = None
    written: Checkpoint | None = None
    """What a daemon has written, with `theirs`: it is read again."""

    async def read(self, *, owns: bool) -> Restored:
        self.owned.append(owns)
        return Restored(self.written or Checkpoint(), self.origin, "", self.theirs)

    async def found(self, *, owns: bool) -> Mapping[ClaimUid, FoundFiles]:
        self.owned.append(owns)
        return {files.uid: files for files in self.files}

    async def remove(self, uid: ClaimUid, directories: Iterable[str] = ()) -> None:
        self.removed.append(uid)

    async def clear_mounted(self) -> None:
        self.cleared += 1

    async def write(self, contents: Checkpoint | ClaimContents) -> None:
        assert self.theirs is not None, "nothing is to be written"
        assert isinstance(contents, Checkpoint)
        self.written = contents


async def test_files_of_no_claim_are_left_while_another_daemon_serves(autojump_clock: object) -> None:
    """It may have written them since the checkpoint was read, and would say that the claim is prepared."""
    store, wanted = Store(), Latest(ClaimsWanted(load=1))
    post, inbox = trio.open_memory_channel[Event](10)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint_keeper.run, wanted.subscribe(), store, store, post)
            assert isinstance(await inbox.receive(), CheckpointRead)
            assert (store.owned, store.removed) == ([False, False], [])
            wanted.set(ClaimsWanted(load=2))
            assert isinstance(await inbox.receive(), CheckpointRead)
            assert (store.owned, store.removed) == ([False, False, True, True], [UID])
            nursery.cancel_scope.cancel()


LOST = ClaimUid("8b3f0c52-0000-4000-8000-000000000002")


@pytest.mark.parametrize("origin", [Origin.NONE, Origin.CORRUPT])
async def test_metadata_without_the_cdi_file_is_removed_where_the_checkpoint_is_lost(
    origin: Origin, autojump_clock: object
) -> None:
    """After a reboot nothing else is left of a claim, and kubelet may have lost it as well: then no unprepare names it.
    Files whose devices cannot be read stay: who has those devices is not known."""
    metadata = {"metadata": {"namespace": "default", "name": "one", "uid": LOST}}
    unreadable = FoundFiles.of(UID, True, ("gpu",), [], [])
    store = Store(origin, (FoundFiles.of(LOST, False, ("gpu",), None, [metadata]), unreadable))
    wanted = Latest(ClaimsWanted(load=1))
    post, inbox = trio.open_memory_channel[Event](10)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint_keeper.run, wanted.subscribe(), store, store, post)
            assert isinstance(await inbox.receive(), CheckpointRead)
            assert store.removed == [], "another daemon serves"
            wanted.set(ClaimsWanted(load=2))
            read = await inbox.receive()
            assert isinstance(read, CheckpointRead)
            assert (store.removed, read.entries) == ([LOST], ())
            assert UID in read.warning
            assert LOST not in read.warning
            nursery.cancel_scope.cancel()


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
    store = NewerStore(files=(FoundFiles.of(LOST, True, ("gpu",), [cdi], [metadata]), *Store.files))
    wanted = Latest(ClaimsWanted(load=2))
    post, inbox = trio.open_memory_channel[Event](10)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint_keeper.run, wanted.subscribe(), store, store, post)
            refused = await inbox.receive()
            assert isinstance(refused, CheckpointRefused)
            assert refused.reason == "it is of version 9"
            (entry,) = refused.entries
            assert entry.name == ClaimName("default", "one", LOST)
            assert [gpu.address for gpu in entry.gpus] == ["0000:23:00.0"]
            assert store.removed == []
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("origin", list(Origin))
async def test_mounted_directories_are_removed_where_the_checkpoint_is_of_another_boot(
    origin: Origin, autojump_clock: object
) -> None:
    """In the same boot a container may have them mounted. They are not another daemon's, which serves."""
    store, wanted = Store(origin), Latest(ClaimsWanted(load=1))
    post, inbox = trio.open_memory_channel[Event](10)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint_keeper.run, wanted.subscribe(), store, store, post)
            assert isinstance(await inbox.receive(), CheckpointRead)
            assert store.cleared == 0
            wanted.set(ClaimsWanted(load=2))
            assert isinstance(await inbox.receive(), CheckpointRead)
            assert store.cleared == (origin is Origin.OTHER_BOOT)
            nursery.cancel_scope.cancel()


# --- what NVIDIA's driver has left ------------------------------------------------------------------------------------


def theirs(*uids: ClaimUid, checksum: str = "sha256:00") -> Theirs:
    names = [ClaimName("", "", uid) for uid in uids]
    entries = (StoredEntry(name, ClaimState.TAKEN_OVER, Claim(name, None, 0, ()), ()) for name in names)
    return Theirs(checksum, tuple(entries))


async def loaded(store: Store, wanted: ClaimsWanted | None = None) -> tuple[StoredEntry, ...]:
    """What a daemon that starts to serve reads; then this is wanted of it."""
    cell = Latest(ClaimsWanted(load=2))
    post, inbox = trio.open_memory_channel[Event](10)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint_keeper.run, cell.subscribe(), store, store, post)
            read = await inbox.receive()
            assert isinstance(read, CheckpointRead)
            if wanted is not None:
                cell.set(wanted)
                assert isinstance(await inbox.receive(), CheckpointWritten)
            nursery.cancel_scope.cancel()
    return read.entries


def with_entries(*entries: StoredEntry) -> ClaimsWanted:
    return ClaimsWanted(load=2, checkpoint=CheckpointWanted(1, entries, ()))


async def test_each_state_of_nvidias_checkpoint_is_taken_over_once(autojump_clock: object) -> None:
    """It goes on naming a claim that has ended here since; when NVIDIA's driver has served again, all of it counts."""
    store = Store(files=(), theirs=theirs(UID, LOST))
    both = await loaded(store)
    assert [entry.name.uid for entry in both] == [UID, LOST]
    assert await loaded(store) == both, "nothing has been written since"
    await loaded(store, with_entries(both[0]))  # the other one has ended
    assert await loaded(store) == (both[0],)
    store.theirs = theirs(UID, LOST, checksum="sha256:11")
    assert await loaded(store) == both


async def test_what_was_taken_over_is_not_among_our_own_claims_on_disk(autojump_clock: object) -> None:
    """A daemon that does not know its state would take the whole checkpoint for damaged."""
    store = Store(files=(), theirs=theirs(UID))
    await loaded(store, with_entries(*theirs(UID).claims))
    assert store.written is not None
    assert (set(store.written.claims), set(store.written.taken_over)) == (set(), {UID})


async def test_directories_that_nvidias_driver_has_made_in_this_boot_are_left(autojump_clock: object) -> None:
    """Our own checkpoint is of another boot; the daemon of a domain has one of them mounted."""
    store = Store(Origin.OTHER_BOOT, (), theirs=theirs(UID))
    await loaded(store)
    assert store.cleared == 0
