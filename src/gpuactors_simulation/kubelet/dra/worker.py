"""The fake kubelet's work on the claims of a pod: prepare before its sandbox, unprepare after its containers.

Plays PrepareResources, UnprepareResources and the reconcile loop of cm/dra/manager.go of kubelet 1.36, and a pod
worker's retries. There is no order across claims of different names: each pod does its own calls when it is its turn.
Must not know how a plugin is reached (`drivers.py`).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, final

import trio

from gpuactors_simulation.kubelet.dra.drivers import DriverManager
from gpuactors_simulation.kubelet.dra.manager import ClaimManager
from gpuactors_simulation.kubelet.dra.values import (
    Answer,
    ApiAwayError,
    ClaimError,
    ClaimInfo,
    ClaimObject,
    Surroundings,
)
from gpuactors_simulation.kubelet.values import Pod

PREPARE_AGAIN_S: Final = (60.0, 90.0)
"""After a failed prepare the pod worker comes back within these bounds (kubernetes issue 139836; 62 s was seen)."""

UNPREPARE_AGAIN_S: Final = (10.0, 15.4)
"""After a failed unprepare: 15.4 s and 12 s were seen, and 10 s where the driver was away."""

RECONCILE_S: Final = 60.0
"""How often claims are looked for whose pods are not active any more (cm/dra, defaultReconcilePeriod)."""


@final
class ClaimWorker:
    """Lives as long as kubelet's process. `publish` is called after each change, `there` says whether the API server
    can be reached, `active` are the UIDs of the pods that are to run; None while kubelet does not know its pods."""

    def __init__(
        self,
        claims: ClaimManager,
        drivers: DriverManager,
        surroundings: Surroundings,
        rng: random.Random,
        publish: Callable[[], None],
        is_reachable: Callable[[], bool],
        active: Callable[[], Collection[str] | None],
    ) -> None:
        self._claims = claims
        self._drivers = drivers
        self._surroundings = surroundings
        self._rng = rng
        self._publish = publish
        self._is_reachable = is_reachable
        self._active = active
        self._met: set[str] = set()
        """The pods that this kubelet has met: it has a worker for each."""
        self._releasing: set[str] = set()

    def meet(self, pods: Collection[str]) -> None:
        """These pods, by UID, have a worker from now on."""
        self._met.update(pods)

    # --- prepare ----------------------------------------------------------------------------------------------

    async def prepare(self, pod: Pod, unwanted: Callable[[], Awaitable[None]]) -> str | None:
        """Before the pod's sandbox is made. Returns why it cannot be, or None. The call in flight is cancelled when
        `unwanted` returns."""
        if not pod.uses:
            return None
        problem: str | None = None

        async def cancel() -> None:
            await unwanted()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel)
            try:
                await self._prepare(pod)
            except ClaimError as error:
                problem = (
                    "FailedPrepareDynamicResources: Failed to prepare dynamic resources: "
                    f"prepare dynamic resources: {error}"
                )
            nursery.cancel_scope.cancel()
        self._publish()
        return problem

    def prepare_again_s(self) -> float:
        """Return how long a pod worker waits after a failed prepare."""
        return self._rng.uniform(*PREPARE_AGAIN_S)

    async def _prepare(self, pod: Pod) -> None:
        objects = [self._object(pod, name) for name in pod.uses]
        for driver in sorted({driver for claim in objects for driver in claim.drivers}):
            self._drivers.check(driver)  # also of a claim that is prepared already
        unprepared = self._claims.use(pod.uid, objects)
        self._publish()
        batches = self._batches(unprepared)
        for driver, batch in batches.items():
            answers = await self._drivers.prepare(driver, batch)
            for claim, answer in _checked("NodePrepareResources", batch, answers):
                self._claims.answered(claim, driver, answer.devices)
        self._claims.prepared(unprepared)

    def _object(self, pod: Pod, name: str) -> ClaimObject:
        try:
            claim = self._surroundings.claim(pod.namespace, name) if self._is_reachable() else None
            away = not self._is_reachable()
        except ApiAwayError:
            claim, away = None, True
        if claim is None:
            why = "connection refused" if away else f'resourceclaims.resource.k8s.io "{name}" not found'
            raise ClaimError(f"fetch ResourceClaim {name}: {why}")
        if not claim.drivers:  # nor is it reserved for the pod, which kubelet looks at first
            raise ClaimError(
                f"pod {pod.name} ({pod.uid}) is not allowed to use ResourceClaim {name} ({claim.uid})"
            )
        return claim

    # --- unprepare --------------------------------------------------------------------------------------------

    async def release(self, pod: Pod, note: Callable[[str], None]) -> bool:
        """After the pod's containers have ended: unprepares until it succeeds, and calls `note` with each error.

        Returns False where another task does it, or this kubelet has never met the pod: then the loop does it.
        """
        if pod.uid in self._releasing or pod.uid not in self._met:
            return not self._claims.of_pod(pod.uid)
        self._releasing.add(pod.uid)
        keys = [(pod.namespace, name) for name in pod.uses]
        try:
            while (problem := await self.unprepare(pod.uid, keys)) is not None:
                note(problem)
                self._publish()
                await trio.sleep(self._rng.uniform(*UNPREPARE_AGAIN_S))
        finally:
            self._releasing.discard(pod.uid)
        return True

    async def reconcile(self) -> None:
        """For ever: unprepares what only pods use that are not active, whatever their containers do."""
        while True:
            active = self._active()
            for pod in () if active is None else self._claims.without(active):
                await self.unprepare(pod, [claim.key for claim in self._claims.of_pod(pod)])
            await trio.sleep(RECONCILE_S)

    async def unprepare(self, pod: str, keys: Iterable[tuple[str, str]]) -> str | None:
        """The claims that a pod names, which is given by its UID. Returns why not, or None."""
        claims = self._claims.leave(pod, keys)
        try:
            for driver, batch in self._batches(claims).items():
                answers = await self._drivers.unprepare(driver, batch)
                for _ in _checked("NodeUnprepareResources", batch, answers):
                    pass
            self._claims.unprepared(claims)
        except ClaimError as error:
            return f"unprepare dynamic resources: {error}"
        finally:
            self._publish()
        return None

    # --- both -------------------------------------------------------------------------------------------------

    def _batches(self, claims: Sequence[ClaimInfo]) -> dict[str, list[ClaimInfo]]:
        """Return the claims of each driver, in no order of drivers."""
        drivers = sorted({driver for claim in claims for driver in claim.drivers})
        self._rng.shuffle(drivers)
        return {driver: [claim for claim in claims if driver in claim.drivers] for driver in drivers}


def _checked(
    method: str, claims: Sequence[ClaimInfo], answers: Mapping[str, Answer]
) -> Iterator[tuple[ClaimInfo, Answer]]:
    """Each claim with its answer. Raises `ClaimError` at one that is for nobody or an error, and where one is missing
    after all others: what came before it counts."""
    asked = {claim.uid: claim for claim in claims}
    for uid, answer in answers.items():
        if uid not in asked:
            raise ClaimError(f"{method} returned result for unknown claim UID {uid}")
        if answer.error:
            raise ClaimError(f"{method} failed for ResourceClaim {asked[uid].name}: {answer.error}")
        yield asked[uid], answer
    if len(answers) < len(claims):
        raise ClaimError(f"{method} skipped {len(claims) - len(answers)} ResourceClaims")
