"""grpcio's own stubs, generated from the same .proto: the independent client and server."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import grpc_tools
import pytest
from grpc_tools import protoc

from .support import IndependentStubs

PROTOS = Path(__file__).parents[2] / "protos"


@pytest.fixture(scope="session")
def independent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndependentStubs]:
    """`deviceplugin_pb2` and `deviceplugin_pb2_grpc` as grpcio-tools makes them, under names of their own."""
    target = tmp_path_factory.mktemp("grpcio_stubs")
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [f"-I{PROTOS}", f"-I{well_known}", f"--python_out={target}", f"--grpc_python_out={target}"]
    assert protoc.main(["protoc", *arguments, str(PROTOS / "deviceplugin.proto")]) == 0
    names = ("deviceplugin_pb2", "deviceplugin_pb2_grpc")
    shadowed = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield IndependentStubs(*(_load(name, target) for name in names))
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(shadowed)


def _load(name: str, directory: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, directory / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
