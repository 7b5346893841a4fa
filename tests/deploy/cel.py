"""Expressions of the manifests, evaluated by Google's own CEL, with the optional values that the API server enables.

A Kubernetes API server adds functions of its own and checks types by its schemas; our expressions use no such function,
and here every type is dynamic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cel_expr_python import cel
from cel_expr_python.ext.ext_optional import ExtOptional

from tests.deploy.manifests import Manifest

_NAMES: Final = ("request", "object", "oldObject", "variables", "device")
_ENVIRONMENT: Final = cel.NewEnv(variables=dict.fromkeys(_NAMES, cel.Type.DYN), extensions=[ExtOptional()])


class CelError(Exception):
    """The expression has no value; the text is CEL's."""


def evaluated(expression: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression. Raises `CelError`."""
    found = _ENVIRONMENT.compile(expression).eval(data=names)
    if found.type() == cel.Type.ERROR:
        raise CelError(str(found.value()))
    return found.plain_value()


@dataclass(frozen=True)
class Request:
    """A request as an admission policy sees it."""

    operation: str
    user: str
    extra: Mapping[str, list[str]] | None
    """What the token says; None: the request has no such field."""
    object: Manifest | None = None
    old: Manifest | None = None

    @property
    def names(self) -> dict[str, Any]:
        info = {"username": self.user} | ({"extra": self.extra} if self.extra is not None else {})
        request = {"operation": self.operation, "userInfo": info}
        return {"request": request, "object": self.object, "oldObject": self.old}


def denied(policy: Manifest, request: Request) -> str | None:
    """Why a ValidatingAdmissionPolicy denies a request; None if it lets it pass, or is not about it."""
    spec, names = policy["spec"], request.names
    assert spec["failurePolicy"] == "Fail", "an expression without a value denies"
    try:
        if not all(evaluated(one["expression"], names) for one in spec["matchConditions"]):
            return None
        variables: dict[str, Any] = {}
        for one in spec["variables"]:
            variables[one["name"]] = evaluated(one["expression"], names | {"variables": variables})
        for one in spec["validations"]:
            if not evaluated(one["expression"], names | {"variables": variables}):
                return str(one["message"])
    except CelError as error:
        return str(error)
    return None
