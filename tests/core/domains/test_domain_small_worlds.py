"""Every order of up to four events in worlds of channels and daemons of compute domains (`just small-worlds`; up to two
in `just test`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims import answers
from gpuactors.core.claims import machine as claims
from gpuactors.core.domains import exclusion, label
from gpuactors.core.events.domains import LabelPatched
from gpuactors.core.state.claims import domain_of
from gpuactors.core.state.domains import Domains, Label
from gpuactors.core.values.claim import ClaimUid
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Effect
from tests.core.domains.domain_core import BLUE, DAEMON, channel, daemon, name
from tests.core.domains.small_world import small_world, world_of
from tests.core.orders import check_every_order, is_found

ONE, TWO = name("one"), name("two")

ONE_CHANNEL = (channel(ONE), channel(TWO), daemon(DAEMON))
TWO_CHANNELS = (channel(ONE), channel(TWO, device="channel-1"), daemon(DAEMON))
TWO_DOMAINS = (channel(ONE), channel(TWO, BLUE, "channel-1"), daemon(DAEMON))

DONE = "all that is asked for is done"
WITH_DAEMON = (DONE, "daemon is to be prepared", DONE)
PREPARED = (*WITH_DAEMON, "one is to be prepared", DONE)
BOTH = (*PREPARED, "two is to be prepared", DONE)
RELEASED = (
    "one is to be unprepared",
    "the checkpoint is written",
    "files are done",
    "the checkpoint is written",
    "the label's time is over",
)

# The one with the most orders first: so two processes end at about the same time.
WORLDS = {
    "two channels of one domain, both claimed": world_of(*TWO_CHANNELS, channels=2, begins=BOTH),
    "two domains, and one has the channel": world_of(*TWO_DOMAINS, channels=2, begins=PREPARED),
    "one channel, a claim has it, and another one waits": world_of(*ONE_CHANNEL, begins=BOTH),
    "one channel, and its label is being removed": world_of(*ONE_CHANNEL, begins=(*PREPARED, *RELEASED)),
    "one channel, whose claim waits for the daemon": world_of(
        *ONE_CHANNEL, begins=("one is to be prepared", DONE)
    ),
    "one channel, no claim": world_of(*ONE_CHANNEL),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.timeout(600)
def test_a_channel_has_one_owner_and_the_node_its_label_after_every_order(name: str) -> None:
    check_every_order(small_world(WORLDS[name]))


# --- planted bugs -------------------------------------------------------------------------------------------------


def _the_channel_is_anybody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's: a claim that has only been started is no owner."""
    monkeypatch.setattr(exclusion, "_by_another_claim", lambda *_: None)


def _a_node_takes_part_in_two_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusion, "_by_another_domain", lambda *_: None)


def _a_release_takes_the_label_from_the_next_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA issue 641."""
    monkeypatch.setattr(label, "_KEEPS", label._NEEDS | {ClaimState.RESERVED})


def _a_label_that_is_being_removed_counts_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Label, "is_going", False)


def _the_label_goes_before_the_end_of_its_claim_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label, "_is_early", lambda *_: False)


def _the_label_comes_before_its_claim_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label, "_NEEDS", label._NEEDS | {ClaimState.RESERVED})


def _a_patch_whose_answer_is_lost_was_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = label.patched

    def believed(domains: Domains, answer: LabelPatched, at: float) -> tuple[Domains, list[Effect]]:
        domains, lines = patched(domains, answer, at)
        if answer.failure is None or answer.conflict:
            return domains, lines
        return replace(domains, label=replace(domains.label, unsure=False, retry_at=math.inf)), lines

    monkeypatch.setattr(label, "patched", believed)


def _somebody_s_label_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's: the label is written without a look at who has set it."""
    judged = label._judged

    def ours(known: Label, of: label.Held) -> Label:
        after = judged(known, of)
        return after if after.value is None else replace(after, removable=(*after.removable, after.value))

    monkeypatch.setattr(label, "_judged", ours)


def _a_label_is_stale_before_the_claims_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = label._judged
    monkeypatch.setattr(label, "_judged", lambda known, of: judged(known, replace(of, is_complete=True)))


def _a_lost_label_stays_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's: it is set once, at the prepare."""
    monkeypatch.setattr(label, "touched", lambda domains: domains)


def _a_stale_label_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's."""
    judged = label._judged
    monkeypatch.setattr(label, "_judged", lambda now, held: judged(replace(now, initial=None), held))


def _the_daemon_of_the_label_before_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's: its claim is there, and the API server says Ready of it."""
    monkeypatch.setattr(label, "_daemons", lambda _: frozenset())


def _a_daemon_whose_claim_is_not_read_yet_is_of_the_next_label(monkeypatch: pytest.MonkeyPatch) -> None:
    daemons = label._daemons

    def of_read_claims(domains: Domains) -> frozenset[ClaimUid]:
        return frozenset(
            u for u in daemons(domains) if domain_of(domains.claims.entries[u]).config is not None
        )

    monkeypatch.setattr(label, "_daemons", of_read_claims)


def _a_deleted_domain_gets_its_label_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever NVIDIA's controller takes it away."""
    monkeypatch.setattr(label, "_is_addable", lambda *_: True)


def _a_channel_needs_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusion, "has_daemon", lambda *_: True)


def _what_was_ready_before_the_label_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = label.patched

    def as_before(domains: Domains, answer: LabelPatched, at: float) -> tuple[Domains, list[Effect]]:
        after, lines = patched(domains, answer, at)
        return replace(after, label=replace(after.label, added=domains.label.added)), lines

    monkeypatch.setattr(label, "patched", as_before)


def _a_lost_checkpoint_frees_the_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    others = exclusion._others
    monkeypatch.setattr(
        exclusion, "_others", lambda *of: [e for e in others(*of) if domain_of(e).domain is not None]
    )


def _a_late_call_is_answered_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "limits", SimpleNamespace(CLAIM_ANSWER_S=60.0))
    monkeypatch.setattr(claims, "limits", SimpleNamespace(**{**vars(limits), "CLAIM_ANSWER_S": 60.0}))


EMPTY, HELD = "one channel, no claim", "two domains, and one has the channel"
WAITED_FOR = "one channel, a claim has it, and another one waits"
GOES = "one channel, and its label is being removed"

BUGS: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, int, *tuple[str, ...]]] = {
    _the_channel_is_anybody_s: (EMPTY, 1, *PREPARED, "two is to be prepared"),
    _a_node_takes_part_in_two_domains: (HELD, 2),
    _a_release_takes_the_label_from_the_next_claim: (WAITED_FOR, 1, "one is to be unprepared"),
    _a_label_that_is_being_removed_counts_as_there: (GOES, 1),
    _the_label_goes_before_the_end_of_its_claim_is_on_disk: (HELD, 1, *RELEASED[:3]),
    _the_label_comes_before_its_claim_is_on_disk: (EMPTY, 2),
    _a_patch_whose_answer_is_lost_was_not_made: (GOES, 3),
    _somebody_s_label_is_removed: (HELD, 1),
    _a_label_is_stale_before_the_claims_are_read: (HELD, 2, "somebody sets the label"),
    _a_lost_label_stays_lost: (HELD, 1),
    _a_stale_label_stays: (GOES, 1),
    _the_daemon_of_the_label_before_counts: (GOES, 2, "one is to be prepared"),
    _a_daemon_whose_claim_is_not_read_yet_is_of_the_next_label: (
        HELD,
        1,
        "the checkpoint is lost",
        "the label is read",
        "somebody removes the label",
    ),
    _a_deleted_domain_gets_its_label_back: (
        HELD,
        2,
        "the domain 1 is deleted",
        "the label is read",
        "the label is patched",
        "somebody removes the label",
    ),
    _a_channel_needs_no_daemon: (HELD, 1),
    _what_was_ready_before_the_label_counts: (EMPTY, 1, *WITH_DAEMON, "one is to be prepared"),
    _a_lost_checkpoint_frees_the_channels: (WAITED_FOR, 2, "one is deleted by force"),
    _a_late_call_is_answered_after_a_minute: (HELD, 1),
}
"""With a world, the length of the orders that find it, and what has happened before them."""


@pytest.mark.parametrize("plant", BUGS)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    name, length, *before = BUGS[plant]
    world = replace(WORLDS[name], begins=(*WORLDS[name].begins, *before))
    assert is_found(small_world(world), length)
