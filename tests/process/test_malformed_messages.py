"""Bytes that are no message, at every call of a daemon process: an error for who sent them, and for nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.process.node import H100, HEALTHY, Node, address, open_node, refusal

PLUGIN = "/v1beta1.DevicePlugin/"
CONTROL = "/v1.Control/"
GPU = address(0x23)

OVERRUNS = b"\x0a\x7f"
"""Field 1 announces 127 bytes that are not there."""

MALFORMED: tuple[tuple[str, bytes], ...] = (
    *((f"{PLUGIN}{name}", OVERRUNS) for name in ("GetDevicePluginOptions", "Allocate", "PreStartContainer")),
    (f"{PLUGIN}GetPreferredAllocation", OVERRUNS),
    # Whole on the outside: a request for one container, and what is wrong is in that.
    (f"{PLUGIN}Allocate", b"\x0a\x02\x0a\x0a"),  # the ID is cut short
    (f"{PLUGIN}Allocate", b"\x0a\x05\x0a\x0aabc"),
    (f"{PLUGIN}Allocate", b"\x0a\x01\x0a"),  # nothing after the tag
    (f"{PLUGIN}Allocate", b"\x0a\x02\x08\x05"),  # a number as ID
    (f"{PLUGIN}Allocate", b"\x0a\x03\x0a\x01\xff"),  # no UTF-8
    (f"{PLUGIN}Allocate", b"\x08\x05"),  # a number as container
    (f"{PLUGIN}PreStartContainer", b"\x08\x05"),
    (f"{PLUGIN}GetPreferredAllocation", b"\x0a\x03\x1a\x01\x05"),  # a list as size
    (f"{PLUGIN}GetPreferredAllocation", b"\x0a\x02\x12\x0a"),
    (f"{CONTROL}View", OVERRUNS),
    (f"{CONTROL}HandOver", OVERRUNS),
)


def test_malformed_requests() -> None:
    with open_node() as node, node.daemon() as daemon:
        device_lists = {H100: {GPU: HEALTHY}}
        node.tell(node.plug(0x23, "2330", driver="vfio-pci"))
        node.wait_device_lists(device_lists)
        for path, body in MALFORMED:
            status, text = answer(node, path, body)
            assert status == "INTERNAL", (path, body, text)
            assert "not a valid" in text
        too_many = b"\x0a\x00" * 1025
        for call in ("Allocate", "PreStartContainer", "GetPreferredAllocation"):
            status, text = answer(node, PLUGIN + call, too_many)
            assert status == "INVALID_ARGUMENT", text
        # IDs that may be taken for numbers: `int` knows no superscripts, and no number of so many digits.
        for odd in ("²", "7" * 4301):
            body = b"\x0a" + varint(len(odd.encode())) + odd.encode()
            request = b"\x0a" + varint(len(body)) + body
            assert answer(node, f"{PLUGIN}Allocate", request)[0] == "NOT_FOUND"
            assert answer(node, f"{PLUGIN}PreStartContainer", body)[0] == "NOT_FOUND"
        # A newer kubelet may say more than is known of, and much of it.
        assert answer(node, f"{PLUGIN}GetDevicePluginOptions", b"\x78\x01" * 10_000)[0] == "OK"
        # What would take seconds to read is not read: kubelet's own calls would wait as long.
        for path in (f"{PLUGIN}GetDevicePluginOptions", f"{PLUGIN}Allocate", f"{CONTROL}View"):
            status, text = answer(node, path, b"\x78\x01" * 2_000_000)
            assert (status, "fields" in text) == ("RESOURCE_EXHAUSTED", True), text
        assert (
            answer(node, f"{PLUGIN}GetPreferredAllocation", b"\x0a\x0b\x18" + b"\xff" * 9 + b"\x01")[0]
            == "OK"
        )
        assert node.kubelet.allocate(H100, [GPU]).envs
        node.wait_device_lists(device_lists)
        assert (len(node.accepted(H100)), node.kubelet.stream_ends(H100)) == (1, ())
        assert not [line for line in daemon.log if line["event"] == "daemon.handed_over"]
        node.assert_sound(daemon)


def varint(number: int) -> bytes:
    """A length as protobuf writes it."""
    low, rest = number & 0x7F, number >> 7
    return bytes((low | 0x80,)) + varint(rest) if rest else bytes((low,))


def answer(node: Node, path: str, body: bytes) -> tuple[str, str]:
    """Status and text of a unary call with these bytes as its message."""
    socket: Path = node.endpoint(H100) if path.startswith(PLUGIN) else node.directory / "s/gpuactors.sock"
    # gRPC's own authority for a unix socket is its path in percent-encoding.
    with grpc.insecure_channel(
        f"unix:{socket}", options=[("grpc.default_authority", "localhost")]
    ) as channel:
        try:
            call: Any = channel.unary_unary(path)
            call(body, timeout=10)
        except grpc.RpcError as error:
            return refusal(error)
    return "OK", ""


ODD = "\x1b[2J\x00\r\n\x7f\x9b\u202e\u2066\u2028\ufeff"
"""Control sequences of a terminal, direction marks, line separators."""


@pytest.mark.parametrize(
    ("ids", "status"),
    [
        ([ODD], "NOT_FOUND"),
        (["9" * 5000], "NOT_FOUND"),
        ([f"{ODD}{n}" for n in range(1000)], "NOT_FOUND"),
        ([ODD, ODD], "INVALID_ARGUMENT"),
        (["x" * 3_000_000], "INVALID_ARGUMENT"),
        ([""] * 1024, "INVALID_ARGUMENT"),
    ],
    ids=["odd", "long", "many", "twice", "megabytes", "empty"],
)
def test_a_refusal_is_short_and_printable_in_the_answer_and_in_the_log(ids: list[str], status: str) -> None:
    with open_node() as node, node.daemon() as daemon:
        node.tell(node.plug(0x23, "2330", driver="vfio-pci"))
        node.wait_device_lists({H100: {GPU: HEALTHY}})
        for call in (node.kubelet.allocate, node.kubelet.prestart):
            with pytest.raises(grpc.RpcError) as error:
                call(H100, ids)
            found, text = refusal(error.value)
            assert found == status, text
            assert text.isprintable()
            assert len(text) <= 2000
        node.assert_sound(daemon)
    for line in daemon.log:
        said = json.dumps(line, ensure_ascii=False)
        assert said.isprintable()
        assert len(said) < 10_000
