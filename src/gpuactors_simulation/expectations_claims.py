"""The conditions on claims after a step of a scenario: each a value that is shown as a sentence.

As `expectations.py`, for nodes that serve claims; for those with compute domains besides `expectations_domains.py`.
"""

from __future__ import annotations

from msgspec import Struct

from gpuactors_simulation.situation import ClaimSeen, Situation

_WAITING = "Waiting"


class Found(Struct, frozen=True):
    """Kubelet has found the daemon's DRA plugin, and is connected to it."""

    def __str__(self) -> str:
        return "kubelet has found the DRA plugin"

    def unmet(self, situation: Situation) -> str | None:
        """Implement `Expectation.unmet`."""
        is_found = any(instance.connected for instance in situation.view.dra.instances)
        return None if is_found else "it has not"


class Offered(Struct, frozen=True):
    """Exactly these GPUs are in the node's ResourceSlices, and none is tainted."""

    gpus: frozenset[str]

    def __str__(self) -> str:
        return f"the API server has {_listed(self.gpus)} in the node's ResourceSlices"

    def unmet(self, situation: Situation) -> str | None:
        """Implement `Expectation.unmet`."""
        offered = frozenset(g.address for g in situation.claims.gpus if g.is_offered and not g.is_tainted)
        return None if offered == self.gpus else f"it has {_listed(offered)}"


class OnDriver(Struct, frozen=True):
    """A GPU is on this driver, and its companions on that one."""

    gpu: str
    driver: str
    companions: str = ""
    """Empty: it has none."""

    def __str__(self) -> str:
        its = f", its companion on {self.companions}" if self.companions else ""
        return f"{self.gpu} is on {self.driver}{its}"

    def unmet(self, situation: Situation) -> str | None:
        """Implement `Expectation.unmet`."""
        gpu = next((g for g in situation.claims.gpus if g.address == self.gpu), None)
        if gpu is None:
            return f"{self.gpu} is gone"
        drivers = [(gpu.address, gpu.driver), *gpu.companions]
        expected = [self.driver, *([self.companions] * len(gpu.companions))]
        wrong = [
            f"{a} is on {driver or 'no driver'}"
            for (a, driver), w in zip(drivers, expected, strict=True)
            if driver != w
        ]
        return "; ".join(wrong) or None


class PreparedOn(Struct, frozen=True):
    """Kubelet has the claim prepared, with these devices."""

    claim: str
    devices: frozenset[str]

    def __str__(self) -> str:
        return f"claim {self.claim} is prepared, with {_listed(self.devices)}"

    def unmet(self, situation: Situation) -> str | None:
        """Implement `Expectation.unmet`."""
        claim = situation.claims.find(self.claim)
        if claim is None or not claim.is_prepared:
            return f"it is {state_of(claim)}"
        return None if claim.devices == self.devices else f"it has {_listed(claim.devices)}"


class WaitsFor(Struct, frozen=True):
    """The claim's prepare waits in its call, and the daemon names the claim that it waits for."""

    claim: str
    other: str

    def __str__(self) -> str:
        return f"the prepare of {self.claim} waits for {self.other}"

    def unmet(self, situation: Situation) -> str | None:
        """Implement `Expectation.unmet`."""
        claim = situation.claims.find(self.claim)
        if claim is None or claim.is_prepared or claim.state != _WAITING:
            return f"it is {state_of(claim)}"
        return None if self.other in claim.problem else f"the reason is: {claim.problem or 'none'}"


class NothingLeft(Struct, frozen=True):
    """No claim is prepared, and nothing of one is left on the node."""

    def __str__(self) -> str:
        return "nothing is left of any claim: no file or directory, no entry in the checkpoint, no driver_override"

    def unmet(self, situation: Situation) -> str | None:
        """Implement `Expectation.unmet`."""
        kept_claims = [f"kubelet still has the claim {c.name}" for c in situation.claims.claims if c.is_known]
        return "; ".join([*kept_claims, *(f"there is {trace}" for trace in situation.claims.left)]) or None


def state_of(claim: ClaimSeen | None) -> str:
    """Return the traces of a claim, in words."""
    if claim is None:
        return "not there"
    state = "prepared" if claim.is_prepared else claim.state or "not known to the daemon"
    return state + (f": {claim.problem}" if claim.problem else "")


def _listed(addresses: frozenset[str]) -> str:
    return ", ".join(sorted(addresses)) or "nothing"
