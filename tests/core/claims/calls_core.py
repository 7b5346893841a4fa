"""A core that kubelet calls about the claims of one DRA driver, with what it answers."""

from __future__ import annotations

from typing import ClassVar

from gpuactors import limits
from gpuactors.core.claims.outputs import CheckpointWanted, ReadWanted
from gpuactors.core.claims.view import claims_of
from gpuactors.core.events.claims import CheckpointWritten, ClaimRead, PrepareAsked, UnprepareAsked
from gpuactors.core.state.claims import ClaimRecord
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Claim, ClaimName, ClaimsOf, Prepared, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Effect, Elsewhere, Refused, Reply
from gpuactors.core.values.model import Settings, Token
from tests.core.builders import SETTINGS, Core

AWAY = "the API server does not answer"


class CallsCore(Core):
    """`Core` with claims. What surrounds it answers at once, unless it is held back."""

    of: ClassVar[ClaimsOf]
    """Whose claims these are."""
    tokens: int = 0

    def __init__(self, settings: Settings = SETTINGS, disk: CheckpointWanted | None = None) -> None:
        super().__init__(settings=settings)
        self.api: dict[str, Claim] = {}
        """The claims that the API server has, by namespace and name."""
        self.away = False
        """The API server does not answer."""
        self.disk = disk
        """The checkpoint as it was last written."""
        self.held_back: set[str] = set()

    def token(self) -> Token:
        """That of the next call."""
        self.tokens += 1
        return Token(1000 + self.tokens)

    def created(self, *claims: Claim) -> None:
        """The API server has these claims."""
        self.api |= {str(claim.name): claim for claim in claims}

    def prepare(self, claim: ClaimName | Claim) -> Token:
        """Kubelet prepares the claim; a whole claim is created first."""
        if isinstance(claim, Claim):
            self.created(claim)
            claim = claim.name
        token = self.token()
        self.feed(PrepareAsked(token, claim, self.of))
        return token

    def unprepare(self, claim: ClaimName) -> Token:
        token = self.token()
        self.feed(UnprepareAsked(token, claim, self.of))
        return token

    def answer(self, token: Token) -> Prepared | Unprepared | Refused | Elsewhere | None:
        """The answer to a call; None while it waits."""
        found = [e.answer for e in self.effects if isinstance(e, Reply) and e.token == token]
        assert len(found) <= 1, "a call is answered once"
        if not found:
            return None
        assert isinstance(found[0], Prepared | Unprepared | Refused | Elsewhere)
        return found[0]

    def refusal(self, token: Token) -> str:
        return self.refused(token).reason

    def refused(self, token: Token) -> Refused:
        """The refusal of a call; the log has its words and its causes."""
        answer = self.answer(token)
        assert isinstance(answer, Refused), f"refused, not {answer}"
        logged = [*self.logged("claim.refused"), *self.logged("call.refused")]
        said = [(line.fields["reason"], line.fields["causes"]) for line in logged]
        assert (answer.reason, tuple(map(str, answer.causes))) in said
        return answer

    def cause_of(self, claim: ClaimName, *, late: bool = False) -> Cause:
        """That of the refusal of a prepare: at once, or `late`, when its time has run out."""
        token = self.prepare(claim)
        if late:
            assert self.answer(token) is None
            self.pass_time(limits.CLAIM_ANSWER_S)
        (cause,) = self.refused(token).causes
        return cause

    def entry(self, claim: ClaimName) -> ClaimRecord | None:
        return claims_of(self.state, self.of).entries.get(claim.uid)

    def claim_state(self, claim: ClaimName) -> ClaimState:
        entry = self.entry(claim)
        return ClaimState.ABSENT if entry is None else entry.state

    def problem(self, claim: ClaimName) -> str:
        """Why it is not further."""
        entry = self.entry(claim)
        assert entry is not None
        return entry.problem

    def release(self, *kinds: str) -> list[Effect]:
        """What was held back is answered now, and from now on."""
        self.held_back -= {*kinds}
        return self.feed_answers()

    def read_event(self, wanted: ReadWanted) -> ClaimRead:
        """The API server answers a read."""
        found = self.api.get(str(wanted.claim))
        if self.away:
            return ClaimRead(wanted.number, AWAY, self.of)
        if found is None or found.name.uid != wanted.claim.uid:
            missing = f"the API server has no claim {wanted.claim} with UID {wanted.claim.uid}"
            return ClaimRead(wanted.number, missing, self.of, missing=True)
        return ClaimRead(wanted.number, found, self.of)

    def checkpoint_written(self, wanted: CheckpointWanted) -> CheckpointWritten:
        """The newest contents are on disk."""
        self.disk = wanted
        return CheckpointWritten(wanted.number, self.of)

    def feed_answers(self) -> list[Effect]:
        out: list[Effect] = []
        while (event := self._answer()) is not None:
            out += self._step(event)
        self.effects += out
        return out
