"""The claims of one DRA driver with the state that they are in: what each step of the machine takes and returns."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.claims.driver import Driver
from gpuactors.core.host import schedule
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimRecord, Claims, with_entry
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.core.values.effects import Effect


def claims_of(state: NodeState, kind: ClaimsOf) -> Claims:
    """Return the claims of one driver."""
    return state.gpus.claims if kind is ClaimsOf.GPUS else state.domains.claims


def with_claims(state: NodeState, kind: ClaimsOf, claims: Claims) -> NodeState:
    """Replace the claims of one driver."""
    if kind is ClaimsOf.GPUS:
        return replace(state, gpus=replace(state.gpus, claims=claims))
    return replace(state, domains=replace(state.domains, claims=claims))


class DriverView(Struct, frozen=True, gc=False):
    """The claims of one driver, and the state that they are in."""

    driver: Driver
    state: NodeState
    claims: Claims
    """The driver's claims in `state`."""

    def with_state(self, state: NodeState) -> DriverView:
        """Replace the state, after a change of anything in it."""
        return view_of(state, self.driver) if state is not self.state else self

    def with_claims(self, claims: Claims) -> DriverView:
        """Replace the claims."""
        if claims is self.claims:
            return self
        return DriverView(self.driver, with_claims(self.state, self.driver.kind, claims), claims)

    def with_record(self, record: ClaimRecord) -> DriverView:
        """Replace the record of one claim."""
        return self.with_claims(with_entry(self.claims, record))

    def on_state_changed(self, before: NodeState) -> DriverView:
        """Apply what has changed since `before` (`Claiming.on_state_changed`)."""
        return self.with_state(self.driver.claiming.on_state_changed(before, self.state))

    def request_reads(self, record: ClaimRecord, at: float) -> tuple[DriverView, ClaimRecord]:
        """Request new reads of the claim's devices (`Claiming.request_reads`)."""
        state, record = self.driver.claiming.request_reads(self.state, record, at)
        return self.with_state(state), record

    def reserve(self, record: ClaimRecord) -> tuple[DriverView, ClaimRecord]:
        """Give the claim its devices (`Claiming.reserve`)."""
        state, record = self.driver.claiming.reserve(self.state, record)
        return self.with_state(state), record

    def ask_ledger(self, at: float, *, lists: bool = False) -> DriverView:
        """Request a read of kubelet's ledger; with `lists`, of kubelet's list of its pods."""
        return self.with_state(schedule.ask_ledger(self.state, at, lists=lists))


Stepped = tuple[DriverView, list[Effect]]


def view_of(state: NodeState, driver: Driver) -> DriverView:
    """Return the view of one driver's claims."""
    return DriverView(driver, state, claims_of(state, driver.kind))
