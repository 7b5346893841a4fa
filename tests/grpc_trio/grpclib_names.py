"""Every private name of grpclib, h2 and hpack that gpuactors.grpc_trio uses, and for what.

grpclib is pinned to the version below; `test_grpclib_names.py` fails with a clear message when
the version, a name or a signature has changed. Then: read the new source, adjust the adaptor, run its tests, and only
then change what is written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GRPCLIB_VERSION: Final = "0.4.9"


@dataclass(frozen=True, slots=True)
class PrivateName:
    """`module` and dotted `name` in it; `parameters` if it is called or overridden; `used_for` has the place and the
    reason."""

    module: str
    name: str
    used_for: str
    parameters: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class SetInInit:
    """An attribute that `owner.__init__` sets and that we replace or read."""

    module: str
    owner: str
    attribute: str
    used_for: str


_P = "grpclib.protocol"
_S = "grpclib.server"
_C = "grpclib.client"

PRIVATE_NAMES: Final = (
    PrivateName(_P, "H2Protocol.connection_made", "replaced: builds our connection", ("self", "transport")),
    PrivateName(_P, "H2Protocol.data_received", "replaced: GOAWAY after an error", ("self", "data")),
    PrivateName(_P, "H2Protocol.connection_lost", "called at the stream's end", ("self", "exc")),
    PrivateName(_P, "H2Protocol.pause_writing", "called by the transport", ("self",)),
    PrivateName(_P, "H2Protocol.resume_writing", "called by the transport", ("self",)),
    PrivateName(_P, "Connection.create_stream", "overridden", ("self", "stream_id", "wrapper")),
    PrivateName(_P, "Connection.ack", "overridden: harmless when closed", ("self", "stream_id", "size")),
    PrivateName(_P, "Connection.close", "overridden: wakes senders", ("self",)),
    PrivateName(_P, "Connection.flush", "called", ("self",)),
    PrivateName(_P, "Connection.feed", "called", ("self", "data")),
    PrivateName(_P, "Connection.initialize", "never called: keepalive uses loop.call_later", ("self",)),
    PrivateName(_P, "EventsProcessor.close", "called", ("self", "reason")),
    PrivateName(_P, "EventsProcessor.process", "looks up by event.__class__", ("self", "event")),
    PrivateName(_P, "EventsProcessor.process_stream_reset", "overridden", ("self", "event")),
    PrivateName(_P, "AbstractHandler.accept", "implemented", ("self", "stream", "headers", "release_stream")),
    PrivateName(_P, "AbstractHandler.cancel", "implemented", ("self", "stream")),
    PrivateName(_P, "AbstractHandler.close", "implemented", ("self",)),
    PrivateName(_P, "Stream.init_stream", "overridden: our buffer", ("self", "stream_id", "connection")),
    PrivateName(_P, "Stream.recv_trailers", "overridden: an end without trailers", ("self",)),
    PrivateName(_P, "Stream.send_data", "overridden: gives up", ("self", "data", "end_stream")),
    PrivateName(_P, "Stream.__ended__", "overridden", ("self",)),
    PrivateName(_P, "Stream.__terminated__", "overridden", ("self", "reason")),
    PrivateName(_P, "Stream.closable", "read"),
    PrivateName(_P, "Stream.reset_nowait", "called", ("self", "error_code")),
    PrivateName(_P, "Stream.send_headers", "called", ("self", "headers", "end_stream")),
    PrivateName(_P, "Buffer.add", "replaced, as all of it: asyncio's queue", ("self", "data", "ack_size")),
    PrivateName(_P, "Buffer.eof", "replaced", ("self",)),
    PrivateName(_P, "Buffer.read", "replaced", ("self", "size")),
    PrivateName(_P, "Buffer.unacked_size", "replaced: called when a stream is released", ("self",)),
    PrivateName(_S, "Stream.recv_message", "overridden: limits", ("self",)),
    PrivateName(_S, "Stream.send_message", "overridden: limits", ("self", "message")),
    PrivateName(_S, "Stream._send_initial_metadata_done", "read"),
    PrivateName(_S, "Stream._send_trailing_metadata_done", "read"),
    PrivateName(_S, "Stream._send_message_done", "read and set"),
    PrivateName(_C, "Stream.__aenter__", "overridden: cancel scopes instead of task.cancel", ("self",)),
    PrivateName(_C, "Stream.recv_message", "overridden: limits", ("self",)),
    PrivateName(_C, "Stream._recv_initial_metadata_done", "read"),
    PrivateName(_C, "Handler.connection_lost", "read"),
    PrivateName("h2.connection", "_decode_headers", "calls the decoder", ("decoder", "encoded_header_block")),
    PrivateName("h2.connection", "H2ConnectionStateMachine.process_input", "called", ("self", "input_")),
    PrivateName("h2.connection", "ConnectionInputs.SEND_HEADERS", "given to it"),
    PrivateName("h2.stream", "H2StreamStateMachine.process_input", "called", ("self", "input_")),
    PrivateName("h2.stream", "StreamInputs.SEND_HEADERS", "given to it"),
    PrivateName("h2.stream", "StreamInputs.SEND_DATA", "given to it"),
    PrivateName("h2.stream", "StreamInputs.SEND_END_STREAM", "given to it"),
    PrivateName("hpack", "Decoder.decode", "overridden", ("self", "data", "raw")),
    PrivateName("hpack", "Encoder.encode", "overridden", ("self", "headers", "huffman")),
    PrivateName("grpclib.events", "_DispatchServerEvents", "passed to server.Stream"),
    PrivateName("grpclib.events", "_DispatchChannelEvents", "passed to client.Stream"),
    PrivateName("grpclib.metadata", "Deadline.time_remaining", "overridden: trio's clock", ("self",)),
    PrivateName("grpclib.metadata", "decode_timeout", "called", ("value",)),
    PrivateName("grpclib.metadata", "decode_metadata", "called", ("headers",)),
    PrivateName("grpclib.metadata", "encode_grpc_message", "called", ("message",)),
)

SET_IN_INIT: Final = (
    SetInInit(_P, "Connection", "write_ready", "replaced by our Event"),
    SetInInit(_P, "Connection", "stream_close_waiter", "replaced by our Event"),
    SetInInit(_P, "Connection", "_connection", "h2's connection: GOAWAY, settings"),
    SetInInit(_P, "Connection", "_transport", "passed to our streams"),
    SetInInit(_P, "Stream", "connection", "set by ours"),
    SetInInit(_P, "Stream", "_h2_connection", "set by ours; h2's connection: windows, client side or not"),
    SetInInit(_P, "Stream", "_transport", "set by ours; written to"),
    SetInInit(_P, "Stream", "wrapper", "set by ours"),
    SetInInit(_P, "Stream", "window_updated", "set by ours to our Event"),
    SetInInit(_P, "Stream", "headers", "set by ours"),
    SetInInit(_P, "Stream", "headers_received", "set by ours to our Event"),
    SetInInit(_P, "Stream", "trailers", "set by ours"),
    SetInInit(_P, "Stream", "trailers_received", "set by ours to our Event"),
    SetInInit(_P, "EventsProcessor", "processors", "made to ignore what it does not know"),
    SetInInit(_P, "EventsProcessor", "streams", "looked up on a reset"),
    SetInInit(_S, "Stream", "_cardinality", "read"),
    SetInInit(_S, "Stream", "_recv_type", "read"),
    SetInInit(_S, "Stream", "_send_type", "read"),
    SetInInit(_C, "Stream", "_deadline", "read"),
    SetInInit(_C, "Stream", "_recv_type", "read"),
    SetInInit("h2.connection", "H2Connection", "incoming_buffer", "its _data: bytes of an incomplete frame"),
    SetInInit("h2.connection", "H2Connection", "encoder", "replaced by ours: without a table"),
    SetInInit("h2.connection", "H2Connection", "decoder", "replaced by ours: blocks that come again"),
    SetInInit("h2.connection", "H2Connection", "_closed_streams", "bounded by our MAX_CLOSED_STREAMS"),
    SetInInit("h2.connection", "H2Connection", "state_machine", "told of a whole answer"),
    SetInInit("h2.connection", "H2Connection", "streams", "looked up for its answer"),
    SetInInit("h2.connection", "H2Connection", "outbound_flow_control_window", "taken from by an answer"),
    SetInInit("h2.stream", "H2Stream", "state_machine", "told of a whole answer"),
    SetInInit("h2.stream", "H2Stream", "outbound_flow_control_window", "taken from by an answer"),
    SetInInit("hpack.table", "HeaderTable", "resized", "read: a change of size must be sent first"),
    SetInInit("h2.frame_buffer", "FrameBuffer", "_data", "see incoming_buffer"),
)
