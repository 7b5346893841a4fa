"""What small worlds of claims have in common: kubelet's calls, the API server, the disk, and the claims' files.

What the daemon asks of the API server, of the disk and of the drivers is answered one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, Generic, Self, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors.core.claims.outputs import CheckpointWanted, ClaimsWanted, FilesAct, claims_wanted
from gpuactors.core.claims.view import claims_of, view_of
from gpuactors.core.dra import driver_of
from gpuactors.core.events import Event
from gpuactors.core.events.claims import ActDone, CheckpointWritten, ClaimRead, PrepareAsked, UnprepareAsked
from gpuactors.core.state.claims import ClaimRecord, Claims
from gpuactors.core.values.claim import Claim, ClaimName, ClaimsOf, ClaimUid, Prepared, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Answer, Refused, Reply
from gpuactors.core.values.model import Token
from tests.core.claims.on_disk import read_back, stored
from tests.core.orders import Happening, Node, WrongError
from tests.support.edits import nodes_of

# --- kubelet --------------------------------------------------------------------------------------------------------


class Call(Struct, frozen=True):
    """A call about one claim."""

    uid: ClaimUid
    prepares: bool
    at: float
    """When it came, in seconds of the world's clock."""


class Kubelet(Struct, frozen=True):
    """What kubelet knows of claims."""

    calls: Mapping[Token, Call] = field(default_factory=dict)
    """Calls without an answer."""
    prepared: frozenset[ClaimUid] = frozenset()
    unprepared: frozenset[ClaimUid] = frozenset()
    """Claims whose last unprepare was answered, and that no prepare came for since."""
    refused: Mapping[ClaimUid, str] = field(default_factory=dict)
    """Claims whose last prepare was refused, with the reason."""
    tokens: int = 0

    def waits_for(self, claim: ClaimName, *, prepares: bool) -> bool:
        """A call like this has no answer yet."""
        return any((call.uid, call.prepares) == (claim.uid, prepares) for call in self.calls.values())

    def asked(self, claim: ClaimName, of: ClaimsOf, at: float, *, prepares: bool) -> tuple[Kubelet, Event]:
        """Kubelet after a call, and this. It gives up its prepare when it unprepares."""
        token = Token(self.tokens + 1)
        after = replace(
            self,
            calls={**self.calls, token: Call(claim.uid, prepares, at)},
            prepared=self.prepared if prepares else self.prepared - {claim.uid},
            unprepared=self.unprepared - {claim.uid},
            tokens=token,
        )
        return after, (PrepareAsked if prepares else UnprepareAsked)(token, claim, of)

    def answered(self, token: Token, answer: Answer) -> Kubelet:
        """Kubelet after an answer. Raises `WrongError` if that answers no call of it."""
        if token not in self.calls:
            raise WrongError(f"call {token} is answered a second time, or was never made")
        call, uid = self.calls[token], self.calls[token].uid
        after = replace(self, calls={t: c for t, c in self.calls.items() if t != token})
        match answer:
            case Prepared() if call.prepares:
                return replace(after, prepared=after.prepared | {uid})
            case Unprepared() if not call.prepares:
                return replace(after, unprepared=after.unprepared | {uid})
            case Refused(_, reason) if (
                call.prepares
            ):  # of a claim that was prepared too: it starts nothing with that
                refused = {**after.refused, uid: reason}
                return replace(after, prepared=after.prepared - {uid}, refused=refused)
            case Refused():
                return after
            case _:
                raise WrongError(f"a {'prepare' if call.prepares else 'unprepare'} is answered with {answer}")

    def failed(self) -> Kubelet:
        """Kubelet when the daemon is gone: its calls have failed, its prepares too."""
        failed = {call.uid for call in self.calls.values() if call.prepares}
        return replace(self, calls={}, prepared=self.prepared - failed)

    @property
    def key(self) -> object:
        """What makes two the same for all that can follow, but for the reasons of refusals and the calls' age."""
        return self.prepared, self.unprepared, tuple(sorted((c.uid, c.prepares) for c in self.calls.values()))


NO_CALLS: Final = Kubelet()
"""Before the first."""


# --- the node -------------------------------------------------------------------------------------------------------


class ClaimsOutside(Struct, frozen=True):
    """The node without the daemon."""

    kubelet: Kubelet = NO_CALLS
    disk: CheckpointWanted | None = None
    """The checkpoint as it was last written."""
    files: Mapping[ClaimUid, frozenset[int | None]] = field(default_factory=dict)
    """The claims whose files are there, each with the IOMMU groups that they name."""
    deleted: frozenset[ClaimUid] = frozenset()
    """Claims that the API server does not have any more."""


W = TypeVar("W", bound=ClaimsOutside)


class ClaimsNode(Node[W], Generic[W], frozen=True):
    """A node with claims of one driver."""

    of: ClassVar[ClaimsOf]
    """Whose claims these are."""

    @property
    def claims(self) -> Claims:
        """The daemon's state of them."""
        return claims_of(self.state, self.of)

    @property
    def entries(self) -> Mapping[ClaimUid, ClaimRecord]:
        """The claims by UID."""
        return self.claims.entries

    @property
    def orders(self) -> ClaimsWanted:
        """What the daemon asks for."""
        return claims_wanted(view_of(self.state, driver_of(self.of)))

    def in_api(self, claim: ClaimName) -> Claim:
        """The claim as the API server has it."""
        raise NotImplementedError

    # --- the daemon -------------------------------------------------------------------------------------------------

    def replied(self, before: Self, reply: Reply) -> Self:
        kubelet = self.outside.kubelet
        after = kubelet.answered(reply.token, reply.answer)
        if isinstance(reply.answer, Prepared):
            self.check_prepared(before, kubelet.calls[reply.token].uid)
        return self.with_(kubelet=after)

    def check_prepared(self, before: Self, uid: ClaimUid) -> None:
        """Kubelet is told that a claim is prepared: its state and its files are on disk. Raises `WrongError`."""
        entry = stored(self.outside.disk).get(uid)
        if entry is None or entry.state is not ClaimState.PREPARED:
            raise WrongError(f"{uid} is said to be prepared, and is not on disk as that")
        if uid not in self.outside.files:
            raise WrongError(f"{uid} is said to be prepared, and its files are not there")

    # --- what kubelet and the operator do ---------------------------------------------------------------------------

    def asked(self, claim: ClaimName, *, prepares: bool) -> Self:
        """A prepare or an unprepare comes."""
        kubelet, event = self.outside.kubelet.asked(claim, self.of, self.at, prepares=prepares)
        return self.with_(kubelet=kubelet).stepped(event)

    # --- what the daemon asks for -----------------------------------------------------------------------------------

    def loaded(self) -> Self:
        """The checkpoint is read."""
        return self.stepped(read_back(self.outside.disk, self.of))

    def claim_read(self) -> Self:
        """The API server answers the first read."""
        wanted = self.orders.reads[0]
        if wanted.claim.uid in self.outside.deleted:
            return self.stepped(ClaimRead(wanted.number, "it was deleted", self.of, missing=True))
        return self.stepped(ClaimRead(wanted.number, self.in_api(wanted.claim), self.of))

    def checkpoint_written(self) -> Self:
        """The newest contents are on disk."""
        wanted = self.orders.disk.checkpoint
        assert wanted is not None
        return self.with_(disk=wanted).stepped(CheckpointWritten(wanted.number, self.of))

    def claim_of(self, act: FilesAct) -> ClaimUid:
        """Whose files an act is about that the daemon asks for."""
        return next(uid for uid, wanted in self.orders.files.items() if wanted == act)

    def files_done(self, act: FilesAct) -> Self:
        """An act on files is carried out."""
        claim = self.claim_of(act)
        files = {uid: groups for uid, groups in self.outside.files.items() if uid != claim}
        if act.claim is not None:
            nodes = (node for device in act.devices for node in nodes_of(device))
            files[claim] = frozenset(int(m[1]) for n in nodes if (m := re.fullmatch(_GROUP_NODE, n)))
        return self.with_(files=files).stepped(ActDone(act.number, driver_kind=self.of))


_GROUP_NODE: Final = r"/dev/vfio/([0-9]+)"

N = TypeVar("N", bound=ClaimsNode[ClaimsOutside])

# --- what happens ---------------------------------------------------------------------------------------------------


def calls(claims: Iterable[ClaimName]) -> tuple[Happening[N], ...]:
    """Kubelet's calls about these claims."""
    return tuple(_call(claim, prepares=prepares) for claim in claims for prepares in (True, False))


def _call(claim: ClaimName, *, prepares: bool) -> Happening[N]:
    return Happening(
        _name(claim, prepares=prepares),
        lambda n: n.orders.serving.is_serving and not n.outside.kubelet.waits_for(claim, prepares=prepares),
        lambda n: n.asked(claim, prepares=prepares),
    )


def _name(claim: ClaimName, *, prepares: bool) -> str:
    return f"{claim.name} is to be {'prepared' if prepares else 'unprepared'}"


def forced_deletion(claim: ClaimName) -> Happening[N]:
    """Its pod and itself are gone from the API server; its containers run on. Its unprepare comes later or never."""
    return Happening(
        f"{claim.name} is deleted by force",
        lambda node: claim.uid in node.outside.kubelet.prepared - node.outside.deleted,
        lambda node: node.with_(deleted=node.outside.deleted | {claim.uid}),
    )


# --- interleavings --------------------------------------------------------------------------------------------------


M = TypeVar("M")


class At(Struct, Generic[M], frozen=True):
    """A node in an interleaving, and how often the daemon may still restart and a patch meet another label."""

    node: M
    restarts: int
    conflicts: int = 0


def within(happening: Happening[M]) -> Happening[At[M]]:
    """The same in an interleaving."""
    return Happening(
        happening.name,
        lambda at: happening.enabled(at.node),
        lambda at: replace(at, node=happening.happens(at.node)),
    )


def calls_once(old: ClaimName, *new: ClaimName) -> tuple[Happening[N], ...]:
    """The old claim's unprepare and the new ones' prepares, each once, and again after a restart that it got no answer
    from."""

    def once(claim: ClaimName, *, prepares: bool) -> Happening[N]:
        def enabled(node: N) -> bool:
            kubelet = node.outside.kubelet
            answered = kubelet.prepared | kubelet.refused.keys() if prepares else kubelet.unprepared
            return claim.uid not in answered | {call.uid for call in kubelet.calls.values()}

        return Happening(
            _name(claim, prepares=prepares), enabled, lambda n: n.asked(claim, prepares=prepares)
        )

    return (once(old, prepares=False), *(once(claim, prepares=True) for claim in new))
