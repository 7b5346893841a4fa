"""The DRAPlugin service, v1 and v1beta1, for kubelet to call: prepare and unprepare the claims of one pod.

Each claim of a call is asked of the core by itself, all at once. Must not decide anything about a claim: here are the
messages, and what kubelet makes of an answer.

Kubelet shows a claim's own error to the user, and of a failed call only its status. So everything that goes wrong is a
claim's error: a request that kubelet cannot have meant, and a bug of gpuactors. The answer has an entry for each UID of
the request and for no other one: kubelet 1.35 takes a missing one for a failure without a reason, and one too many for
a failure of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar, final

import trio
from grpclib.const import Handler

from gpuactors import limits
from gpuactors.core.values.claim import ClaimName, ClaimUid, Prepared, PreparedDevice, Unprepared
from gpuactors.core.values.effects import Refused
from gpuactors.core.values.names import is_label, is_subdomain, is_uid
from gpuactors.core.values.quote import quoted_id, quoted_name
from gpuactors.core.values.text import encodable
from gpuactors.kubelet.pb.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1
from gpuactors.ports.claims import ClaimCaller

CALL_CLAIMS_MAX: Final = 256
"""Limit on the claims in one prepare or unprepare: those of one pod that name this driver. No pod has more than one for
each GPU of a node."""

V1: Final = "k8s.io.kubelet.pkg.apis.dra.v1"
PACKAGES: Final = (V1, "k8s.io.kubelet.pkg.apis.dra.v1beta1")
"""The proto packages of the service, one for each version that kubelet may call."""

Done = TypeVar("Done", Prepared, Unprepared)
OnFailure = Callable[[str, Exception], None]


@final
class ClaimCalls:
    """The methods that both versions of the service share. `on_failure` gets an unexpected exception: a bug, to be
    logged."""

    def __init__(self, caller: ClaimCaller, on_failure: OnFailure) -> None:
        self._caller = caller
        self._on_failure = on_failure

    async def prepare(self, claims: Sequence[v1.Claim]) -> Mapping[str, Prepared | str]:
        """Return the answer for each UID: the devices, or an error.

        If one claim fails, all do: kubelet starts no pod without it, asks for all of them again, and before July 2026
        appended the devices of a second answer to those of the first (kubernetes issue 140471).
        """
        answers = await self._ask("prepare", claims, self._caller.prepare)
        failed = next((claim for claim in claims if isinstance(answers[claim.uid], str)), None)
        if failed is None:
            return answers
        reason = f"not prepared, as claim {_called(failed)} of the same pod is not: {answers[failed.uid]}"
        return {uid: answer if isinstance(answer, str) else reason for uid, answer in answers.items()}

    async def unprepare(self, claims: Sequence[v1.Claim]) -> Mapping[str, Unprepared | str]:
        """Return the answer for each UID: that it is done, or an error, independently of the others."""
        return await self._ask("unprepare", claims, self._caller.unprepare)

    async def _ask(
        self,
        call: str,
        claims: Sequence[v1.Claim],
        ask: Callable[[ClaimName], Awaitable[Done | Refused]],
    ) -> dict[str, Done | str]:
        answers: dict[str, Done | str] = {**_problems(claims)}

        async def ask_one(claim: ClaimName) -> None:
            answers[claim.uid] = await self._answer(call, claim, ask)

        async with trio.open_nursery() as nursery:
            for claim in claims:
                if claim.uid not in answers:
                    nursery.start_soon(ask_one, ClaimName(claim.namespace, claim.name, ClaimUid(claim.uid)))
        return {claim.uid: answers[claim.uid] for claim in claims}

    async def _answer(
        self, call: str, claim: ClaimName, ask: Callable[[ClaimName], Awaitable[Done | Refused]]
    ) -> Done | str:
        try:
            with trio.move_on_after(limits.CLAIM_CALL_S):
                answer = await ask(claim)
                if not isinstance(answer, Refused):
                    return answer
                # Kubelet takes an empty error for none.
                return encodable(answer.reason) or f"the {call} of claim {claim} was refused without a reason"
        except Exception as exc:
            self._on_failure(f"{call} of claim {claim}", exc)
            return f"internal error in the {call} of claim {claim}: {exc!r}; please report it"
        return (
            f"the {call} of claim {claim} was not answered within {limits.CLAIM_CALL_S:g} s; "
            "look at the log of this daemon"
        )


def _problems(claims: Sequence[v1.Claim]) -> dict[str, str]:
    """Return why a claim cannot be asked for, by UID."""
    if len(claims) > CALL_CLAIMS_MAX:
        reason = f"{len(claims)} claims in one call: no pod has more than {CALL_CLAIMS_MAX}"
        return {claim.uid: reason for claim in claims}
    times = Counter(claim.uid for claim in claims)
    problems = {claim.uid: _problem(claim) for claim in claims}
    for uid, count in times.items():
        if count > 1:
            problems[uid] = f"the UID {quoted_id(uid)} is in this call {count} times"
    return {uid: reason for uid, reason in problems.items() if reason is not None}


def _problem(claim: v1.Claim) -> str | None:
    if not is_uid(claim.uid):
        return f"claim {_called(claim)} has the UID '{quoted_id(claim.uid)}', which is none"
    if not is_label(claim.namespace):
        return f"claim {claim.uid} has the namespace '{quoted_name(claim.namespace)}', which is none"
    if not is_subdomain(claim.name):
        return f"claim {claim.uid} has the name '{quoted_name(claim.name)}', which is none"
    return None


def _called(claim: v1.Claim) -> str:
    return f"{quoted_name(claim.namespace)}/{quoted_name(claim.name)}"


# --- the versions -----------------------------------------------------------------------------------------------


@final
class DraPlugin(v1.DraPluginBase):
    """The service in the proto package `package`, one of PACKAGES: the messages of both are those of v1, but that
    v1beta1 has no share IDs."""

    def __init__(self, calls: ClaimCalls, package: str) -> None:
        self._calls = calls
        self._package = package
        self._has_share_ids = package == V1

    def __mapping__(self) -> dict[str, Handler]:
        methods = super().__mapping__()
        return {in_package(self._package, path): handler for path, handler in methods.items()}

    async def node_prepare_resources(
        self, message: v1.NodePrepareResourcesRequest
    ) -> v1.NodePrepareResourcesResponse:
        answers = await self._calls.prepare(message.claims)
        return v1.NodePrepareResourcesResponse(claims={uid: self._prepared(a) for uid, a in answers.items()})

    async def node_unprepare_resources(
        self, message: v1.NodeUnprepareResourcesRequest
    ) -> v1.NodeUnprepareResourcesResponse:
        answers = await self._calls.unprepare(message.claims)
        return v1.NodeUnprepareResourcesResponse(
            claims={uid: v1.NodeUnprepareResourceResponse(error=_error(a)) for uid, a in answers.items()}
        )

    def _prepared(self, answer: Prepared | str) -> v1.NodePrepareResourceResponse:
        return v1.NodePrepareResourceResponse(
            error=_error(answer),
            devices=[] if isinstance(answer, str) else [self._device(device) for device in answer.devices],
        )

    def _device(self, device: PreparedDevice) -> v1.Device:
        return v1.Device(
            request_names=list(device.requests),
            pool_name=device.pool,
            device_name=device.device,
            cdi_device_ids=list(device.cdi_ids),
            share_id=device.share_id if self._has_share_ids else None,
        )


def in_package(package: str, path: str) -> str:
    """Return the path of a method, `/package.Service/Method`, in another package."""
    return f"/{package}.{path.rpartition('.')[2]}"


def _error(answer: Prepared | Unprepared | str) -> str:
    return answer if isinstance(answer, str) else ""
