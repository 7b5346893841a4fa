"""Header blocks that are not decoded or encoded again mean what hpack's own decoder and encoder make of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import h2.config
import h2.connection
import hpack
from hypothesis import example, given
from hypothesis import strategies as st

from gpuactors.grpc_trio.http2 import INITIAL, OK, _H2Connection

SOME = [
    (":method", "POST"),
    (":path", "/v1beta1.DevicePlugin/Allocate"),
    ("te", "trailers"),
    ("grpc-timeout", "1S"),
    ("grpc-timeout", "2S"),
    *[(f"x-{n}", "v" * 500) for n in range(9)],  # so that entries are evicted (4,096 bytes)
]
BLOCKS = st.lists(
    st.tuples(st.lists(st.sampled_from(SOME), max_size=4), st.booleans(), st.integers(1, 3)), max_size=20
)


def connection() -> _H2Connection:
    return _H2Connection(h2.config.H2Configuration(client_side=False))


def texts(headers: Iterable[Any]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers]


@given(BLOCKS)
@example([([SOME[4]], False, 2), ([SOME[5]], False, 2)])  # the same index of another entry
@example([([SOME[4]], False, 2), ([], False, 1)])
def test_repeated_headers_are_those_that_were_sent(
    blocks: list[tuple[list[tuple[str, str]], bool, int]],
) -> None:
    """Whatever comes between changes the table or not; `sensitive` headers are in no table."""
    encoder, ours, theirs = hpack.Encoder(), connection().decoder, hpack.Decoder()
    for headers, sensitive, times in blocks:
        for _ in range(times):
            block = encoder.encode([(name, value, sensitive) for name, value in headers])
            assert list(ours.decode(block, raw=True)) == list(theirs.decode(block, raw=True))


@given(st.lists(st.sampled_from([INITIAL, OK, SOME[:4], [(":status", "200"), ("grpc-status", "13")]])))
def test_constant_headers_are_read_as_they_are(sent: list[list[tuple[str, str]]]) -> None:
    """Also while the table fills with what else is sent."""
    encoder, theirs = connection().encoder, hpack.Decoder()
    for headers in sent:
        block = encoder.encode([(name.encode(), value.encode()) for name, value in headers])
        assert texts(theirs.decode(block)) == headers


def test_a_new_size_of_the_table_is_sent_before_constant_headers() -> None:
    encoder, theirs = connection().encoder, hpack.Decoder()
    encoder.header_table_size = 0
    assert texts(theirs.decode(encoder.encode([(b"grpc-status", b"0")]))) == OK
    assert theirs.header_table_size == 0
