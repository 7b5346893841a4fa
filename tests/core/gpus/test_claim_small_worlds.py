"""Every order of up to five events in worlds of two claims and one GPU (`just small-worlds`; up to two in `just
test`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gpuactors.core.claims import outputs, progress, transitions
from gpuactors.core.gpus import claiming, exclusion, placement, reservation
from gpuactors.core.values import claim_states as table
from gpuactors.core.values import prebound
from gpuactors.core.values.claim_states import ClaimState, ClaimTrigger
from tests.core.builders import audio, disk, gpu
from tests.core.gpus.small_world import DISK, GPU, World, small_world
from tests.core.orders import check_every_order, is_found
from tests.core.other_driver import a_name_without_a_file_means_no_gpu, others_claims_are_not_seen

ON_HOST = gpu(GPU, 1, driver="nvidia")
PRE_BOUND = gpu(GPU, 1)
AUDIO = audio("0000:01:00.1", 1, driver="snd_hda_intel")

IDLE_DISK = disk(DISK, 1, driver=None)

DONE = "all that is asked for is done"
PREPARED = ("one is to be prepared", DONE)
UNREAD = ("one is to be prepared", "one is to be unprepared")
LOST_BY = (*PREPARED, "it is unplugged", "the node is seen")
BINDING = (
    "one is to be prepared",
    "the claim is read",
    "the node is seen",
    "the checkpoint is written",
)
RELEASING = (*PREPARED, "one is to be unprepared", "the checkpoint is written")
WAITED_FOR = (*PREPARED, "two is to be prepared", "the claim is read", "the node is seen")
SWAPPED = (*BINDING, "it is unplugged", "the node is seen", "it is plugged in", "the act is done")
OTHERS = ("another driver's claim gets it", "time passes", DONE)
OVERTAKEN = (
    "one is to be prepared",
    "another driver's claim gets it, and no file says which",
    "the claim is read",
)

WORLDS = {
    "on its host driver": World((ON_HOST,)),
    "pre-bound": World((PRE_BOUND,)),
    "on its host driver, with an audio function": World((ON_HOST, AUDIO)),
    "on its host driver, and a claim was unprepared while it was read": World((ON_HOST,), UNREAD),
    "on its host driver, being bound for a claim": World((ON_HOST,), BINDING),
    "on its host driver, and swapped while it is bound for a claim": World((ON_HOST,), SWAPPED),
    "on its host driver, and a claim has it": World((ON_HOST,), PREPARED),
    "on its host driver, and a claim has it, and it is unplugged": World((ON_HOST,), LOST_BY),
    "with an audio function, a claim has both, and another one waits": World((ON_HOST, AUDIO), WAITED_FOR),
    "pre-bound, a claim has it, and another one waits": World((PRE_BOUND,), WAITED_FOR),
    "pre-bound, with an audio function, and a claim has both": World((PRE_BOUND, AUDIO), PREPARED),
    "with an audio function, being returned": World((ON_HOST, AUDIO), RELEASING),
    "beside a disk that the host may take": World((ON_HOST, IDLE_DISK)),
    "beside a disk that the host may take, being bound for a claim": World((ON_HOST, IDLE_DISK), BINDING),
    "pre-bound, beside a disk that the host may take": World((PRE_BOUND, IDLE_DISK)),
    "pre-bound, beside another driver": World((PRE_BOUND,), has_other_driver=True),
    "on its host driver, beside another driver": World((ON_HOST,), has_other_driver=True),
    "pre-bound, and another driver's claim has it": World((PRE_BOUND,), OTHERS, has_other_driver=True),
    "pre-bound, and a claim is read while another driver's claim gets it": World(
        (PRE_BOUND,), OVERTAKEN, has_other_driver=True
    ),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.timeout(900)
def test_the_gpu_has_one_owner_and_its_rightful_driver_after_every_order(name: str) -> None:
    check_every_order(small_world(WORLDS[name]))


# --- planted bugs -----------------------------------------------------------------------------------------------


def _nobody_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's: exclusion by name, in memory only."""
    monkeypatch.setattr(exclusion, "_by_another_claim", lambda *_, **__: None)


def _pods_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusion, "_by_holding", lambda *_, **__: None)


def _pods_do_not_see_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "with_reserved", lambda _, claims: claims)


def _a_release_is_over_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    owning = table.OWNING - {ClaimState.RELEASING}
    for module in (exclusion, outputs, reservation):
        monkeypatch.setattr(module, "OWNING", owning)


def _the_original_driver_is_noted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's: a retry after its own bind finds the GPU on vfio."""
    noted = prebound.noted
    monkeypatch.setattr(prebound, "noted", lambda known, functions, _acted: noted(known, functions))


def _companions_stay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = exclusion.with_companions
    monkeypatch.setattr(
        reservation, "with_companions", lambda s, a: tuple(f for f in alone(s, a) if f.address == a)
    )


def _the_checkpoint_does_not_tell_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk = outputs._on_disk
    monkeypatch.setattr(outputs, "_on_disk", lambda e: replace(on_disk(e), state=ClaimState.PREPARED))


def _a_stopped_claim_is_forgotten_without_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's: a half-done claim is dropped."""
    rows = {
        **table.TRANSITIONS,
        (ClaimState.STOPPED, ClaimTrigger.UNPREPARE): (ClaimState.TOMBSTONE, table.Request.FORGET),
    }
    monkeypatch.setattr(table, "TRANSITIONS", rows)


def _a_returned_gpu_is_offered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "seen_again", lambda state, gpus: replace(gpus, returned={}))


def _a_read_outlives_its_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transitions, "read_over", lambda claims, _uid: claims)


def _a_failed_release_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_is_to_be_undone", lambda _view, e: not e.acts and not e.problem)


def _a_repeated_prepare_does_not_look_at_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "drift", lambda *_: None)


def _files_stay_when_the_gpu_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's, and ours once: nothing is looked at between two prepares."""
    monkeypatch.setattr(placement, "drifted", lambda *_: [])


def _a_claim_is_given_what_was_free_in_the_last_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusion, "_unseen", lambda *_: None)


def _a_model_of_an_earlier_boot_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's, and ours once."""
    monkeypatch.setattr(exclusion, "another_model", lambda *_: None)


HOST, PAIR = "on its host driver", "on its host driver, with an audio function"
HELD = "on its host driver, and a claim has it"
BOUND = "on its host driver, being bound for a claim"
LOST = "on its host driver, and a claim has it, and it is unplugged"
SWAPPED_IN_A_BIND = "on its host driver, and swapped while it is bound for a claim"
UNPREPARED = "on its host driver, and a claim was unprepared while it was read"
WAITS = "pre-bound, a claim has it, and another one waits"
BESIDE = "pre-bound, beside another driver"

BUGS: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, int]] = {
    _nobody_else_is_seen: (HELD, 3),
    _pods_are_not_seen: ("pre-bound", 3),
    _pods_do_not_see_claims: ("pre-bound", 1),
    _a_release_is_over_when_it_begins: (WAITS, 2),
    _the_original_driver_is_noted_anew: (SWAPPED_IN_A_BIND, 1),
    _companions_stay_behind: (PAIR, 1),
    _the_checkpoint_does_not_tell_a_release: (HOST, 2),
    _a_stopped_claim_is_forgotten_without_a_release: (BOUND, 2),
    _a_returned_gpu_is_offered_at_once: (HELD, 2),
    _a_read_outlives_its_claim: (UNPREPARED, 3),
    _a_repeated_prepare_does_not_look_at_the_gpu: (LOST, 2),
    _files_stay_when_the_gpu_is_gone: (HELD, 1),
    _a_model_of_an_earlier_boot_counts_for_nothing: (HELD, 3),
    _a_failed_release_is_given_up: ("with an audio function, being returned", 2),
    others_claims_are_not_seen: (BESIDE, 2),
    a_name_without_a_file_means_no_gpu: (BESIDE, 2),
    _a_claim_is_given_what_was_free_in_the_last_list: (BESIDE, 3),
}
"""With a world and the length of the orders that find it."""


@pytest.mark.parametrize("plant", BUGS)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    world, length = BUGS[plant]
    assert is_found(small_world(WORLDS[world]), length)
