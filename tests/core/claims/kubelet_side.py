"""Kubelet's side of claims in a small world: its calls that have no answer yet, and what it takes from the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors.core.events import Event
from gpuactors.core.events.claims import PrepareAsked, UnprepareAsked
from gpuactors.core.values.claim import ClaimName, ClaimsOf, ClaimUid, Prepared, Unprepared
from gpuactors.core.values.effects import Answer, Refused
from gpuactors.core.values.model import Token
from tests.core.orders import WrongError


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
