"""What is not decoded or encoded again, or made without h2, is what hpack's and h2's own would have been."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import h2.config
import h2.connection
import h2.exceptions
import hpack
import pytest
from h2.settings import SettingCodes
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


@given(st.lists(st.sampled_from([INITIAL, OK, SOME, [(":status", "200"), ("grpc-message", "ä"), ("x", "")]])))
def test_headers_are_read_as_they_were_sent(sent: list[list[tuple[str, str]]]) -> None:
    encoder, theirs = connection().encoder, hpack.Decoder()
    for headers in sent:
        block = encoder.encode([(name.encode(), value.encode()) for name, value in headers])
        assert texts(theirs.decode(block)) == headers


def test_a_new_size_of_the_table_is_sent_before_other_headers() -> None:
    encoder, theirs = connection().encoder, hpack.Decoder()
    encoder.header_table_size = 0
    assert texts(theirs.decode(encoder.encode([(b"grpc-status", b"0")]))) == OK
    assert theirs.header_table_size == 0


def asked(*, end_stream: bool, settings: dict[int, int]) -> _H2Connection:
    """A server's side with a request on stream 1."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    client.update_settings(settings)
    client.send_headers(1, [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "a")])
    client.send_data(1, b"abc", end_stream=end_stream)
    server = connection()
    server.receive_data(client.data_to_send())
    server.clear_outbound_data_buffer()
    return server


@pytest.mark.parametrize("end_stream", [True, False])
@pytest.mark.parametrize("size", [0, 5, 255, 16_384])
def test_an_answer_in_one_go_is_the_one_that_h2_makes(size: int, end_stream: bool) -> None:
    ours, theirs = (asked(end_stream=end_stream, settings={}) for _ in range(2))
    for connection in (ours, theirs):
        connection.ping(b"12345678")  # waits to be sent
    answer = ours.answer(1, b"m" * size)
    theirs.send_headers(1, INITIAL)
    theirs.send_data(1, b"m" * size)
    theirs.send_headers(1, OK, end_stream=True)
    assert answer == theirs.data_to_send()
    assert ours.data_to_send() == b""
    left = [(c.outbound_flow_control_window, vars(c.streams[1].state_machine)) for c in (ours, theirs)]
    assert left[0] == left[1]
    assert ours.streams[1].outbound_flow_control_window == theirs.streams[1].outbound_flow_control_window
    with pytest.raises(h2.exceptions.ProtocolError):
        ours.answer(1, b"again")


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (16_385, {SettingCodes.MAX_FRAME_SIZE: 4 << 20}),  # over our own limit of a frame
        (5, {SettingCodes.INITIAL_WINDOW_SIZE: 4}),
        (5, {SettingCodes.HEADER_TABLE_SIZE: 0}),  # a change that must be sent first
    ],
)
def test_an_answer_that_does_not_fit_is_left_to_h2(size: int, settings: dict[int, int]) -> None:
    server = asked(end_stream=True, settings=settings)
    assert server.answer(1, b"m" * size) is None
    assert server.data_to_send() == b""
    server.send_headers(1, INITIAL)  # nothing has changed


def test_no_answer_after_the_end_of_the_stream_or_of_the_connection() -> None:
    server = asked(end_stream=True, settings={})
    server.reset_stream(1)
    with pytest.raises(h2.exceptions.ProtocolError):
        server.answer(1, b"m")
    server = asked(end_stream=True, settings={})
    server.close_connection()
    with pytest.raises(h2.exceptions.ProtocolError):
        server.answer(1, b"m")
