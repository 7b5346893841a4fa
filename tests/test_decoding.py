"""What nests too deep, or is no JSON, is one error, whoever has sent it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuactors
from gpuactors.core.claims.opaque_config import ConfigFault
from gpuactors.core.domains import config as domain_config
from gpuactors.core.gpus import config as gpu_config
from gpuactors.core.values.claim import Claim
from gpuactors.decoding import (
    DEPTH_MAX,
    UndecodableError,
    _depth,
    decode_json,
    decode_json_stream,
    without_deep,
)
from gpuactors.kube import errors, objects
from gpuactors.kubelet.ledger import checkpoint_contents
from gpuactors.ports.kube import ApiMalformed
from gpuactors.ports.node import LedgerError

DRIVER, NODE = "gpu.nvidia.com", "node-1"
PACKAGE = Path(gpuactors.__file__).parent

OUTSIDE = ("acts", "actors", "control", "host", "http", "kube", "kubelet")
"""The packages that read files, sockets and programs."""


def nested(levels: int, mix: bool = False) -> bytes:
    opening = b'{"a":[' if mix else b"["
    closing = b"]}" if mix else b"]"
    times = levels // 2 if mix else levels
    return opening * times + closing * times


def claim(driver: str, parameters: bytes) -> bytes:
    """A claim with one device of ours and one configuration."""
    result = {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": "gpu-0000-23-00-0"}
    config = {"source": "FromClaim", "opaque": {"driver": driver, "parameters": "PARAMETERS"}}
    allocation = {"devices": {"results": [result], "config": [config]}}
    found = {"metadata": {"name": "vm", "namespace": "default"}, "status": {"allocation": allocation}}
    return json.dumps(found).encode().replace(b'"PARAMETERS"', parameters)


def read(body: bytes) -> Claim:
    found = errors.answered("read", "server", without_deep(body), objects.ClaimObject)
    return objects.claim(found, DRIVER, NODE)


@pytest.mark.parametrize("mix", [False, True])
def test_the_bound_is_the_last_depth_that_is_decoded(mix: bool) -> None:
    assert decode_json(nested(DEPTH_MAX, mix), object) is not None
    with pytest.raises(UndecodableError, match=f"deeper than {DEPTH_MAX} levels"):
        decode_json(nested(DEPTH_MAX + 2, mix), object)


@pytest.mark.parametrize("levels", [1_000, 100_000])
def test_no_depth_ends_the_caller(levels: int) -> None:
    for content in (nested(levels), nested(levels, mix=True), b"[" * levels, b'{"a":' * levels):
        with pytest.raises(UndecodableError):
            decode_json(content, object)
        with pytest.raises(UndecodableError):
            decode_json(b'{"known":1,"unknown":' + content + b"}", objects.PartialObject)


def test_brackets_in_strings_do_not_count() -> None:
    text = "[" * 2 * DEPTH_MAX + '"\\'
    assert decode_json(json.dumps([text]).encode(), list[str]) == [text]


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_string_without_an_end_is_gone_through_once(end: bytes) -> None:
    """A megabyte of quotes took a time that grew with its square: this test would run for hours."""
    with pytest.raises(UndecodableError):
        decode_json(b"[" * 2 * DEPTH_MAX + b'"' + b'\\"' * 500_000 + end, object)


def test_a_deep_configuration_for_us_is_a_fault_of_the_claim() -> None:
    """A prepare of it is refused, and its reason is the user's to know; it ended the daemon."""
    for levels in (400, 5_000):
        found = read(claim(DRIVER, nested(levels)))
        fault = gpu_config.chosen(found)
        assert isinstance(fault, ConfigFault)
        assert "it nests deeper than 32 levels" in str(fault)
        assert isinstance(domain_config.chosen(found), ConfigFault)


def test_the_parameters_of_other_drivers_are_not_decoded() -> None:
    for levels in (400, 5_000):
        found = read(claim("other.example.com", nested(levels)))
        assert found.configs == ()
        assert found.results is not None


def test_an_object_that_nests_without_end_is_malformed() -> None:
    with pytest.raises(ApiMalformed, match=r"deeper than 512 levels\. Look at the object"):
        errors.answered("read", "server", b'{"metadata":' + nested(700) + b"}", objects.PartialObject)


def test_an_error_that_nests_without_end_is_its_own_message() -> None:
    assert errors.refusal(500, nested(5_000)).code == 500


def test_a_ledger_file_that_nests_without_end_is_damaged() -> None:
    content = b'{"Data":{"PodDeviceEntries":' + nested(5_000) + b"}}"
    with pytest.raises(LedgerError, match="is damaged"):
        checkpoint_contents(content, "/ledger")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda v: st.lists(v) | st.dictionaries(st.text(), v),
)


@given(JSON)
def test_the_depth_is_that_of_the_value(value: Any) -> None:
    def deep(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(deep, inner), default=0)

    assert _depth(json.dumps(value).encode()) == deep(value)
    assert decode_json(json.dumps(value).encode(), object) == value


@given(JSON, st.integers(1, 4))
def test_what_nests_deeper_is_null_and_nothing_else_changes(value: Any, depth_max: int) -> None:
    def cut(value: Any, depth: int = 1) -> Any:
        if not isinstance(value, list | dict):
            return value
        if depth > depth_max:
            return None
        if isinstance(value, list):
            return [cut(inner, depth + 1) for inner in value]
        return {key: cut(inner, depth + 1) for key, inner in value.items()}

    assert json.loads(without_deep(json.dumps(value).encode(), depth_max)) == cut(value)


@given(st.binary() | st.text(alphabet='[]{}",:\\1au').map(str.encode))
def test_whatever_it_is_it_is_one_error(content: bytes) -> None:
    for kind in (object, objects.ClaimObject, objects.SliceObject, objects.PartialObject):
        try:
            decode_json(content, kind)
        except UndecodableError:
            continue


def test_nothing_else_decodes_what_comes_from_outside() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for package in OUTSIDE
        for path in sorted((PACKAGE / package).rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"msgspec\.json\.(decode|Decoder)|json\.(loads?|JSONDecoder)\(", line)
    ]
    assert found == []


def test_values_one_after_the_other_are_read_as_far_as_they_can_be() -> None:
    assert decode_json_stream(b' {"a": 1}\n[2]3 ') == [{"a": 1}, [2], 3]
    assert decode_json_stream(rb'"\ud800"') == ["\ufffd"]
    for damaged in (b"NaN 2", b"[Infinity]", b"{", b"\xff", b'{"a": 1e', b"[" * 100_000):
        assert decode_json_stream(b"1 " + damaged) in ([1], []), damaged
    assert decode_json_stream(nested(100_000) + b" 1")[1:] == [1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (rb'"\ud800"', "\ufffd"),
        (rb'"\uDFFFx"', "\ufffdx"),
        (rb'"\ud83d\ude00"', "\U0001f600"),
        (rb'"\ud800\ud83d\ude00\udc00"', "\ufffd\U0001f600\ufffd"),
        (rb'"\\ud800 \ud800"', r"\ud800 " + "\ufffd"),
        (rb'{"\ud800": ["\udc00"]}', {"\ufffd": ["\ufffd"]}),
    ],
)
def test_half_of_a_surrogate_pair_is_a_replacement_character(text: bytes, value: object) -> None:
    assert decode_json(text, object) == value


def test_half_of_a_surrogate_pair_excuses_nothing_else() -> None:
    with pytest.raises(UndecodableError):
        decode_json(rb'"\ud800', object)
    with pytest.raises(UndecodableError):
        decode_json(rb'"\ud800"', int)


def test_half_of_a_surrogate_pair_in_parameters_is_the_claims_own_matter() -> None:
    """It was said of the server that it is none of 1.34 or newer, also where the parameters are another driver's."""
    assert read(claim("other.example.com", rb'{"a": "\ud800"}')).results is not None
    fault = gpu_config.chosen(read(claim(DRIVER, rb'{"apiVersion": "\ud800", "kind": "VfioDeviceConfig"}')))
    assert isinstance(fault, ConfigFault)
    str(fault).encode()
