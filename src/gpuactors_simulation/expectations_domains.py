"""The conditions on compute domains after a step of a scenario.

As `expectations_claims.py`.
"""

from __future__ import annotations

from msgspec import Struct

from gpuactors_simulation.expectations_claims import state_of
from gpuactors_simulation.situation import DomainsSeen, Situation

_NONE = DomainsSeen()


class ImexOffered(Struct, frozen=True):
    """Exactly these devices are in the node's ResourceSlice."""

    devices: tuple[str, ...]

    def __str__(self) -> str:
        return f"the API server has {', '.join(self.devices) or 'nothing'} in the node's ResourceSlice"

    def unmet(self, situation: Situation) -> str | None:
        """Implement `Expectation.unmet`."""
        offered = _seen(situation).offered
        return None if offered == self.devices else f"it has {', '.join(offered) or 'nothing'}"


class LabelWas(Struct, frozen=True):
    """The node's label has had these values since the beginning, in this order, and no other one in between."""

    values: tuple[str | None, ...]
    """A domain's name, or None: absent. The last one is there now."""

    def __str__(self) -> str:
        last = f"names {self.values[-1]}" if self.values[-1] is not None else "is absent"
        return f"the node's label {last}; since the beginning it was: {labels_in_words(self.values)}"

    def unmet(self, situation: Situation) -> str | None:
        """Implement `Expectation.unmet`."""
        labels = _seen(situation).labels
        return None if labels == self.values else f"it was: {labels_in_words(labels)}"


class Says(Struct, frozen=True):
    """The domain's status says this of the node."""

    status: str
    """Ready, NotReady, or empty: nothing."""

    def __str__(self) -> str:
        return f"the ComputeDomain says {self.status or 'nothing'} of the node"

    def unmet(self, situation: Situation) -> str | None:
        """Implement `Expectation.unmet`."""
        status = _seen(situation).says
        return None if status == self.status else f"it says {status or 'nothing'}"


class Lacks(Struct, frozen=True):
    """The claim has its channel and is not prepared yet, and the daemon says what it lacks with all these words."""

    claim: str
    naming: tuple[str, ...]

    def __str__(self) -> str:
        return f"the prepare of {self.claim} waits, for: {', '.join(self.naming)}"

    def unmet(self, situation: Situation) -> str | None:
        """Implement `Expectation.unmet`."""
        claim = situation.claims.find(self.claim)
        if claim is None or claim.is_prepared or not all(word in claim.problem for word in self.naming):
            return f"it is {state_of(claim)}"
        return None


def labels_in_words(values: tuple[str | None, ...]) -> str:
    """Return the values of the label, one after the other."""
    return ", then ".join(value if value is not None else "absent" for value in values)


def _seen(situation: Situation) -> DomainsSeen:
    return situation.claims.domains or _NONE
