"""grpclib is pinned because the adaptor uses its private names: here is where a new version is noticed."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import tomllib
from pathlib import Path

import pytest

from tests.grpc_trio.grpclib_names import (
    GRPCLIB_VERSION,
    PRIVATE_NAMES,
    SET_IN_INIT,
    PrivateName,
    SetInInit,
)

WHAT_TO_DO = (
    "The adaptor in gpuactors/grpc_trio uses private names of grpclib. Read what has changed, adjust the "
    "adaptor, run its tests, then correct grpclib_names.py."
)


def test_installed_version() -> None:
    installed = importlib.metadata.version("grpclib")
    assert installed == GRPCLIB_VERSION, (
        f"grpclib {installed} is installed, not {GRPCLIB_VERSION}. {WHAT_TO_DO}"
    )


def test_pinned_version() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    pins = [
        dependency for dependency in project["project"]["dependencies"] if dependency.startswith("grpclib")
    ]
    assert pins == [f"grpclib=={GRPCLIB_VERSION}"], f"grpclib must be pinned exactly. {WHAT_TO_DO}"


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda p: f"{p.module}.{p.name}")
def test_name_and_signature(private: PrivateName) -> None:
    found: object = importlib.import_module(private.module)
    for part in private.name.split("."):
        assert hasattr(found, part), (
            f"{private.module}.{private.name} is gone ({private.used_for}). {WHAT_TO_DO}"
        )
        found = getattr(found, part)
    if private.parameters is not None:
        assert callable(found)
        parameters = tuple(inspect.signature(found).parameters)
        assert parameters == private.parameters, (
            f"{private.module}.{private.name} now takes {parameters}, not {private.parameters} "
            f"({private.used_for}). {WHAT_TO_DO}"
        )


@pytest.mark.parametrize("attribute", SET_IN_INIT, ids=lambda a: f"{a.module}.{a.owner}.{a.attribute}")
def test_attribute_set_in_init(attribute: SetInInit) -> None:
    owner = getattr(importlib.import_module(attribute.module), attribute.owner)
    source = inspect.getsource(owner.__init__)
    assert f"self.{attribute.attribute}" in source, (
        f"{attribute.owner}.__init__ of {attribute.module} no longer sets {attribute.attribute} "
        f"({attribute.used_for}). {WHAT_TO_DO}"
    )


def test_generated_stream_helper_has_not_moved() -> None:
    """`TrioService` overrides it; under another name the override would be dead and generators would leak."""
    from betterproto2.grpclib import ServiceBase

    parameters = tuple(inspect.signature(ServiceBase._call_rpc_handler_server_stream).parameters)
    assert parameters == ("self", "handler", "stream", "request")
