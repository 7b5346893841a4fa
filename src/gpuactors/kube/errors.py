"""From the server's status and `Status` body, or from a failed connection, to the errors of `ports/kube.py`.

The only place that writes their sentences: what was asked, of which server, what went wrong, and what to do. Must not
decide whether anything is tried again.
"""

from __future__ import annotations

import errno
import os
import re
import ssl
from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec

from gpuactors.core.values.quote import quoted, quoted_name
from gpuactors.decoding import TooDeepError, UndecodableError, decode_json
from gpuactors.ports.kube import ApiAway, ApiMalformed, ApiRefused, Refusal
from gpuactors.process.resource_exhaustion import shortage

T = TypeVar("T")


_SECONDS: Final = re.compile(rb"[0-9]{1,6}")


class _Details(msgspec.Struct):
    name: str = ""
    kind: str = ""
    retry_after_s: int | None = msgspec.field(name="retryAfterSeconds", default=None)


class _Status(msgspec.Struct):
    """`Status` (meta/v1); all of it is optional."""

    kind: str = ""
    code: int = 0
    reason: str = ""
    message: str = ""
    details: _Details = msgspec.field(default_factory=_Details)


_REMEDIES: Final = {
    401: "The server does not know this client: check that the token or client certificate is valid",
    403: "Grant its service account this verb on this resource (RBAC; the overlays `dra`, `compute-domains`, "
    "`events` and `fleet` have the rules)",
    404: "Check that the server has this resource: ResourceSlices and ResourceClaims of v1 from 1.34 on, "
    "ComputeDomains where NVIDIA's CustomResourceDefinitions are installed",
    409: "Another client has changed it: gpuactors reads it again and decides anew",
    410: "It is listed anew",
    422: "The server does not accept this object: an admission policy may forbid it; otherwise report this",
    429: "The server is overloaded: it is asked again later",
}


def refusal(status: int, body: bytes, retry_after: bytes = b"") -> Refusal:
    """Decode the server's refusal. A body that is no `Status` (a proxy's page, or the plain text of priority and
    fairness) is its own message. `retry_after`: the header; of its two forms only the seconds are understood."""
    asked_s = int(retry_after) if _SECONDS.fullmatch(retry_after) else None
    try:
        answer = decode_json(body, _Status)
    except UndecodableError:
        return Refusal(status, message=body.decode(errors="replace"), retry_after_s=asked_s)
    details = answer.details
    if details.retry_after_s is not None:
        asked_s = details.retry_after_s
    return Refusal(answer.code or status, answer.reason, answer.message, details.kind, details.name, asked_s)


def refused(what: str, server: str, said: Refusal) -> ApiRefused:
    """Return the error for an answer that was none of success."""
    what_it_is = f"{said.code} {quoted_name(said.reason)}".strip()
    words = ": ".join(filter(None, [what_it_is, quoted(said.message)]))
    remedy = _REMEDIES.get(said.code, "It is tried again; see the API server's log")
    return ApiRefused(f"could not {what}: the API server {server} answers {words}. {remedy}.", said)


def away(what: str, server: str, error: BaseException) -> ApiAway:
    """Return the error for a request that was not answered."""
    if (reason := shortage(error)) is not None:
        return ApiAway(f"could not {what} (the API server {server}): {reason}")
    return ApiAway(f"could not {what}: the API server {server} {_why(error)}. It is tried again.")


def late(what: str, server: str, within_s: float) -> ApiAway:
    """Return the error for a request that was not answered in time."""
    return ApiAway(
        f"could not {what}: the API server {server} did not answer in {within_s:g} s. It is tried again."
    )


def malformed(what: str, server: str, problem: str) -> ApiMalformed:
    """Return the error for an answer that makes no sense."""
    return ApiMalformed(
        f"could not {what}: the answer of the API server {server} cannot be read: {quoted(problem)}. "
        "Check that this address is a Kubernetes API server's of 1.34 or newer."
    )


def answered(what: str, server: str, body: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode the server's answer. Raises `ApiMalformed`."""
    try:
        return decode_json(body, kind)
    except TooDeepError as exc:
        raise ApiMalformed(
            f"could not {what}: {exc}. Look at the object, in a claim at its opaque parameters, and at who made it."
        ) from exc
    except UndecodableError as exc:
        raise malformed(what, server, str(exc)) from exc


def _why(error: BaseException) -> str:
    """Return the cause that says most: the innermost of the kernel's or of TLS."""
    sentence = f"cannot be reached ({error})" if str(error) else f"cannot be reached ({type(error).__name__})"
    for cause in _causes(error):
        match cause:
            case ssl.SSLCertVerificationError():
                return (
                    f"has a certificate that is not valid for us: {cause.verify_message or cause}; check the CA and "
                    "the server's name"
                )
            case ssl.SSLError():
                sentence = f"does not complete TLS: {cause}"
            case OSError(errno=int(number)) if number in errno.errorcode:
                sentence = f"cannot be reached: {os.strerror(number)} ({errno.errorcode[number]})"
            case _:
                pass
    return quoted(sentence)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        error = inner or error.__cause__ or error.__context__
