"""What a daemon goes on with at its start: by the checkpoint, the files of the claims, and NVIDIA's checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from gpuactors.core.claims.cdi import device_name
from gpuactors.core.claims.checkpoint import Checkpoint, Origin, Restored, Theirs
from gpuactors.core.claims.files import FoundFiles
from gpuactors.core.claims.outputs import CheckpointWanted
from gpuactors.core.claims.restoration import Restoration, next_content, restoration
from gpuactors.core.claims.stored import encoded_entry
from gpuactors.core.state.claims import DomainReservation, StoredEntry, gpus_of
from gpuactors.core.values.claim import Claim, ClaimName, ClaimsOf, ClaimUid, OriginalDriver
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import ClaimedDomain, DomainUid
from gpuactors.core.values.model import PciAddress, device_key

ONE = ClaimUid("8b3f0c52-0000-4000-8000-000000000001")
TWO = ClaimUid("8b3f0c52-0000-4000-8000-000000000002")
GPU = PciAddress("0000:23:00.0")
BLUE = DomainUid("8b3f0c52-0000-4000-8000-00000000000b")

Found = tuple[ClaimUid, FoundFiles]
"""The files of a claim."""

EMPTY = Restored(Checkpoint(), Origin.FOUND, "")


def files(uid: ClaimUid, *devices: str, cdi: bool = True, name: str | None = "one") -> Found:
    """The files of a claim: its metadata file with this name, if any, and its CDI file with these devices."""
    metadata = [{"metadata": {"namespace": "default", "name": name, "uid": uid}}] if name is not None else []
    content = [{"devices": [{"name": device_name(uid, device)} for device in devices]}]
    return uid, FoundFiles.of(uid, content if cdi else None, metadata)


def restored(
    checkpoint: Restored, found: Iterable[Found] = (), of: ClaimsOf = ClaimsOf.GPUS, *, owns: bool = True
) -> Restoration:
    return restoration(checkpoint, dict(found), of, owns=owns)


def stored(uid: ClaimUid, state: ClaimState = ClaimState.PREPARED) -> StoredEntry:
    name = ClaimName("default", "one", uid)
    return StoredEntry(name, state, Claim(name, None, 0, ()), None)


def on_disk(*entries: StoredEntry) -> Checkpoint:
    return Checkpoint({entry.name.uid: encoded_entry(entry) for entry in entries})


# --- a checkpoint that counts -----------------------------------------------------------------------------------------


def test_the_claims_of_the_checkpoint_go_on_and_files_of_no_claim_are_removed() -> None:
    first = OriginalDriver(GPU, "nvidia", vfio=False)
    before = replace(on_disk(stored(ONE)), original_drivers={GPU: first})
    found = restored(Restored(before, Origin.FOUND, ""), (files(ONE), files(TWO)))
    assert [entry.name.uid for entry in found.entries] == [ONE]
    assert (found.original_drivers, found.stray, found.warning) == ((first,), (TWO,), "")
    assert found.kept == before


def test_files_of_no_claim_are_left_while_another_daemon_serves() -> None:
    """It may have written them since the checkpoint was read, and would say that the claim is prepared."""
    assert restored(EMPTY, (files(ONE),), owns=False).stray == ()


@pytest.mark.parametrize("owns", [False, True])
@pytest.mark.parametrize("origin", list(Origin))
def test_mounted_directories_are_removed_where_the_checkpoint_is_of_another_boot(
    origin: Origin, owns: bool
) -> None:
    """In the same boot a container may have them mounted."""
    found = restored(Restored(Checkpoint(), origin, ""), owns=owns)
    assert found.clear_mounted is (owns and origin is Origin.OTHER_BOOT)


# --- a checkpoint that is lost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", list(Origin))
def test_kubelet_may_list_more_claims_where_no_checkpoint_of_this_boot_names_them(origin: Origin) -> None:
    found = restored(Restored(Checkpoint(), origin, ""))
    assert found.is_lost is (origin in (Origin.NONE, Origin.CORRUPT))


def test_without_a_checkpoint_and_without_files_nothing_is_lost() -> None:
    found = restored(Restored(Checkpoint(), Origin.NONE, "there is none"))
    assert (found.entries, found.warning) == ((), "")


@pytest.mark.parametrize("origin", [Origin.NONE, Origin.CORRUPT])
def test_where_the_checkpoint_is_lost_the_files_name_the_claims(origin: Origin) -> None:
    """How the GPU was bound is not known, so it stays as it is at the end of the claim."""
    found = restored(Restored(Checkpoint(), origin, "it is damaged"), (files(ONE, "gpu-0000-23-00-0"),))
    (entry,) = found.entries
    assert (entry.name, entry.state) == (ClaimName("default", "one", ONE), ClaimState.PREPARED)
    assert [(gpu.key, bool(gpu.keep_on_vfio)) for gpu in gpus_of(entry).gpus] == [(device_key(GPU), True)]
    assert (found.stray, found.warning) == ((), "it is damaged")


@pytest.mark.parametrize("origin", [Origin.NONE, Origin.CORRUPT])
def test_metadata_without_the_cdi_file_is_removed_where_the_checkpoint_is_lost(origin: Origin) -> None:
    """After a reboot nothing else is left of a claim, and kubelet may have lost it as well: then no unprepare names it.
    Files whose devices cannot be read stay: who has those devices is not known."""
    gone, unreadable = files(TWO, cdi=False), files(ONE, name=None)
    found = restored(Restored(Checkpoint(), origin, ""), (gone, unreadable))
    assert (found.stray, found.entries) == ((TWO,), ())
    assert ONE in found.warning
    assert TWO not in found.warning


def test_files_without_a_gpu_are_of_a_claim_of_a_compute_domain_alone() -> None:
    lost = Restored(Checkpoint(), Origin.CORRUPT, "it is damaged")
    of_gpus, of_domains = (restored(lost, (files(ONE, "channel-0"),), of) for of in ClaimsOf)
    assert of_gpus.entries == ()
    assert ONE in of_gpus.warning
    assert [entry.name.uid for entry in of_domains.entries] == [ONE]
    assert of_domains.warning == "it is damaged"


def test_one_entry_that_makes_no_sense_loses_all_of_them() -> None:
    before = replace(on_disk(stored(ONE)), owed=({"address": 7},), unknown={"newer": 1})
    found = restored(
        Restored(before, Origin.FOUND, ""), (files(ONE, "gpu-0000-23-00-0"), files(TWO, cdi=False))
    )
    assert [entry.name.uid for entry in found.entries] == [ONE]
    assert (found.owed, found.stray) == ((), (TWO,))
    assert found.warning.startswith("an entry of the checkpoint is invalid (")
    assert found.is_lost
    assert found.kept == Checkpoint(unknown={"newer": 1})


# --- what NVIDIA's driver has left ------------------------------------------------------------------------------------


def theirs(*uids: ClaimUid, checksum: str = "sha256:00") -> Theirs:
    return Theirs(checksum, tuple(stored(uid, ClaimState.TAKEN_OVER) for uid in uids))


def test_each_state_of_nvidias_checkpoint_is_taken_over_once() -> None:
    """It goes on naming a claim that has ended here since; when NVIDIA's driver has served again, all of it counts."""
    before = Restored(Checkpoint(), Origin.FOUND, "", theirs(ONE, TWO))
    both = restored(before)
    assert [entry.name.uid for entry in both.entries] == [ONE, TWO]
    assert restored(before).entries == both.entries, "nothing has been written since"
    after = next_content(both.kept, CheckpointWanted(1, both.entries[:1], ()))  # the other one has ended
    assert restored(replace(before, checkpoint=after)).entries == both.entries[:1]
    again = Restored(after, Origin.FOUND, "", theirs(ONE, TWO, checksum="sha256:11"))
    assert restored(again).entries == both.entries


def for_domain(uid: ClaimUid, domain: DomainUid | None) -> StoredEntry:
    own = ClaimedDomain(domain, "", "", (), None) if domain is not None else None
    return replace(stored(uid, ClaimState.TAKEN_OVER), reservation=DomainReservation(domain=own))


@pytest.mark.parametrize("origin", [Origin.NONE, Origin.FOUND, Origin.OTHER_BOOT])
def test_directories_of_domains_without_a_claim_are_removed_where_nvidias_driver_was(origin: Origin) -> None:
    """Its own sweep is gone with it. The daemon of a domain with a claim has its directory mounted."""
    begins = Restored(Checkpoint(), origin, "", Theirs("sha256:00", (for_domain(ONE, BLUE),)))
    found = restored(begins, of=ClaimsOf.DOMAINS)
    assert (found.clear_mounted, found.mounted) == (True, frozenset({BLUE}))
    ended = next_content(found.kept, CheckpointWanted(1, (), ()))
    found = restored(replace(begins, checkpoint=ended, origin=Origin.FOUND), of=ClaimsOf.DOMAINS)
    assert (found.entries, found.clear_mounted, found.mounted) == ((), True, frozenset())
    assert not restored(begins, of=ClaimsOf.DOMAINS, owns=False).clear_mounted
    assert not restored(begins, of=ClaimsOf.GPUS).clear_mounted


def test_directories_are_left_where_it_is_not_known_for_which_domains_there_are_claims() -> None:
    """Unknown is not empty."""
    unknown = Theirs("sha256:00", (for_domain(ONE, BLUE), for_domain(TWO, None)))
    assert not restored(Restored(Checkpoint(), Origin.FOUND, "", unknown), of=ClaimsOf.DOMAINS).clear_mounted
    for lost in (Origin.CORRUPT, Origin.NONE):
        found = restored(Restored(Checkpoint(), lost, "", theirs()), (files(ONE),), ClaimsOf.DOMAINS)
        assert not found.clear_mounted
    assert not restored(Restored(Checkpoint(), Origin.FOUND, ""), of=ClaimsOf.DOMAINS).clear_mounted


def test_after_a_boot_every_directory_goes_unless_nvidias_driver_has_served_since() -> None:
    for left in (None, theirs()):
        found = restored(Restored(Checkpoint(), Origin.OTHER_BOOT, "", left), of=ClaimsOf.DOMAINS)
        assert (found.clear_mounted, found.mounted) == (True, None)


# --- what is written --------------------------------------------------------------------------------------------------


def test_what_was_taken_over_is_not_among_our_own_claims_on_disk() -> None:
    """A daemon that does not know its state would take the whole checkpoint for damaged."""
    entries = (stored(ONE), stored(TWO, ClaimState.TAKEN_OVER))
    written = next_content(Checkpoint(), CheckpointWanted(1, entries, ()))
    assert (set(written.claims), set(written.taken_over)) == ({ONE}, {TWO})


def test_fields_of_a_newer_daemon_are_kept_with_their_claim() -> None:
    of_both = {ONE: {"newer": 1}, TWO: {"newer": 2}}
    written = next_content(Checkpoint(of_both, unknown={"newer": 3}), CheckpointWanted(1, (stored(ONE),), ()))
    assert written.claims == {ONE: {"newer": 1, **encoded_entry(stored(ONE))}}
    assert written.unknown == {"newer": 3}
