"""Strict decoding of protobuf messages into betterproto2's classes, and their encoding.

betterproto2 0.10 trusts its peer. A nested message that is cut short becomes a shorter one; a number where a string or
a message belongs is put there as it is, and the type error comes up far from here; each unknown field copies all
unknown bytes so far, so that a megabyte of them takes half a minute. Here all of that is a `ValueError` or, for unknown
fields, nothing at all: a newer peer may send them. `encode` writes what `bytes()` of a message does in an eighth of the
time: betterproto2 changes the process's filters of warnings and back for each field, to make a default to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final, TypeVar

import betterproto2

M = TypeVar("M", bound=betterproto2.Message)

# Wire types (protobuf.dev, Encoding). 3 and 4 are groups, which proto3 does not have.
_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5

_TAG_MAX: Final = (1 << 32) - 1
"""The largest tag: a field number of 29 bits, and a wire type."""


def _signed(value: int, bits: int) -> int:
    """Decode two's complement of the low `bits`: a negative int32 is sent with 64."""
    low = value & ((1 << bits) - 1)
    return low - (1 << bits) if low >> (bits - 1) else low


_SCALARS: Final[Mapping[str, tuple[int, Callable[[Any], object]]]] = {
    betterproto2.TYPE_BOOL: (_VARINT, bool),
    betterproto2.TYPE_INT32: (_VARINT, lambda value: _signed(value, 32)),
    betterproto2.TYPE_INT64: (_VARINT, lambda value: _signed(value, 64)),
    betterproto2.TYPE_UINT64: (_VARINT, int),
    betterproto2.TYPE_BYTES: (_BYTES, bytes),
    betterproto2.TYPE_STRING: (_BYTES, lambda value: value.decode("utf-8")),
}
"""The wire type and conversion of each scalar type in `protos/`."""

_NESTED: Final = frozenset({betterproto2.TYPE_MESSAGE, betterproto2.TYPE_MAP})

_NESTED_FIELDS: Final = 8
"""The number of fields that a nested message counts as besides its own: making one takes as long."""

DECODABLE: Final = _NESTED | _SCALARS.keys() | {betterproto2.TYPE_ENUM}
"""The types of fields that `decode` knows; a field of any other one is a `KeyError`."""


class TooManyFieldsError(ValueError):
    """The message has more fields than are decoded."""


def decode(payload: bytes, message_type: type[M], *, fields_max: float = math.inf) -> M:
    """Decode a message. Raises ValueError unless it is one, down to its innermost field; unknown fields are dropped.

    Raises TooManyFieldsError at the field, known or not, after the first `fields_max`.
    """
    message = message_type()
    _merge(payload, message, _Fields(fields_max))
    return message


def parts(payload: bytes, number: int) -> list[bytes]:
    """Return the encoded messages of a repeated field, for a caller that knows most of them already. Raises ValueError
    as `decode` does for the message itself."""
    payloads = []
    for field, wire_type, value in _Fields(math.inf).read(payload):
        if field != number:
            continue
        if wire_type != _BYTES:
            raise ValueError(f"field {number} has wire type {wire_type}, not {_BYTES}")
        payloads.append(value)
    return payloads


class _Fields:
    """Reads the fields of one message, nested ones included, and counts them."""

    def __init__(self, fields_max: float) -> None:
        self._max = fields_max
        self._count = 0

    def add(self, fields: int) -> None:
        """Count these as well. Raises TooManyFieldsError."""
        self._count += fields
        if self._count > self._max:
            raise TooManyFieldsError(f"more than {self._max:,} fields")

    def read(self, payload: bytes) -> Iterator[tuple[int, int, Any]]:
        """Yield number, wire type and value (int or bytes) of each field. Raises ValueError if one is cut short."""
        position = 0
        while position < len(payload):
            self.add(1)
            tag, position = _varint(payload, position)
            if tag >> 3 == 0 or tag > _TAG_MAX:
                raise ValueError(f"field number {tag >> 3}")
            value, position = _value(payload, position, tag & 7)
            yield tag >> 3, tag & 7, value


def _merge(payload: bytes, message: betterproto2.Message, fields: _Fields, *, is_entry: bool = False) -> None:
    """Set the fields in `message`: append repeated ones, and merge into a nested message that is set already. The entry
    of a map has a key and a value only, whatever the peer's version."""
    fields_meta = message._betterproto  # type: ignore[arg-type]  # their annotation of a class property
    for number, wire_type, value in fields.read(payload):
        name = fields_meta.field_name_by_number.get(number)
        if name is None:
            if is_entry:
                raise ValueError(f"an entry of a map has a field {number}")
            continue
        meta = fields_meta.meta_by_field_name[name]
        if meta.proto_type in _NESTED:
            expected, converted = _BYTES, None
        elif meta.proto_type == betterproto2.TYPE_ENUM:
            expected, converted = _VARINT, _of_enum(fields_meta.cls_by_field[name])
        else:
            expected, converted = _SCALARS[meta.proto_type]
        if converted is not None and meta.repeated and wire_type == _BYTES != expected:
            getattr(message, name).extend(map(converted, _packed(value, expected)))
            continue
        if wire_type != expected:
            raise ValueError(f"field {name} has wire type {wire_type}, not {expected}")
        if converted is None:
            _merge_nested(value, message, fields, fields_meta.cls_by_field[name], meta)
        elif meta.repeated:
            getattr(message, name).append(converted(value))
        else:
            setattr(message, name, converted(value))


def _of_enum(enum: Callable[[int], object]) -> Callable[[Any], object]:
    """Return the conversion to `enum`. Proto3's enums are open: an unknown number is a nameless member."""
    return lambda value: enum(_signed(value, 32))


def _merge_nested(
    payload: bytes,
    message: betterproto2.Message,
    fields: _Fields,
    message_type: type,
    meta: betterproto2.FieldMetadata,
) -> None:
    name = message._betterproto.field_name_by_number[meta.number]  # type: ignore[arg-type]  # as above
    fields.add(_NESTED_FIELDS)
    current = getattr(message, name)
    if meta.proto_type == betterproto2.TYPE_MAP:
        entry = message_type()
        _merge(payload, entry, fields, is_entry=True)
        # An absent message reads as None; in a map it is an empty one (protobuf.dev, Language Guide, Maps).
        current[entry.key] = (
            entry._betterproto.cls_by_field["value"]() if entry.value is None else entry.value
        )
    elif meta.repeated:
        nested = message_type()
        _merge(payload, nested, fields)
        current.append(nested)
    else:
        nested = message_type() if current is None else current
        _merge(payload, nested, fields)
        setattr(message, name, nested)


def _packed(payload: bytes, wire_type: int) -> Iterator[Any]:
    position = 0
    while position < len(payload):
        value, position = _value(payload, position, wire_type)
        yield value


def _value(payload: bytes, position: int, wire_type: int) -> tuple[int | bytes, int]:
    """Return one value, and the position after it."""
    if wire_type == _VARINT:
        return _varint(payload, position)
    if wire_type == _BYTES:
        size_bytes, position = _varint(payload, position)
    elif wire_type == _FIXED64:
        size_bytes = 8
    elif wire_type == _FIXED32:
        size_bytes = 4
    else:
        raise ValueError(f"wire type {wire_type}")
    end = position + size_bytes
    if end > len(payload):
        raise ValueError("a field runs over the end")
    return payload[position:end], end


def _varint(payload: bytes, position: int) -> tuple[int, int]:
    """Return a number of at most 64 bits, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(payload):
            raise ValueError("a number runs over the end")
        byte = payload[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, position
    raise ValueError("a number of more than 64 bits")


# --- encoding ---------------------------------------------------------------------------------------------

_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(0x80))
"""The varints of one byte, by value."""


def encode(message: betterproto2.Message) -> bytes:
    """Encode the message as `bytes(message)` does, without unknown fields, which `decode` has dropped.

    A class with its own `__bytes__` is encoded by that. Raises ValueError for a number of more than 64 bits, or a text
    with a lone surrogate.
    """
    if type(message).__bytes__ is not betterproto2.Message.__bytes__:
        return bytes(message)
    parts = []
    for name, is_optional, field in _fields_of(type(message)):
        value = getattr(message, name)
        if value if not is_optional else value is not None:
            parts.append(field(value))
    return b"".join(parts)


def part(number: int, payload: bytes) -> bytes:
    """Encode a field of bytes, a text or an encoded message, with its tag; parts joined are a message."""
    return _sized(_varint_bytes(number << 3 | _BYTES), payload)


@cache
def _fields_of(
    message_type: type[betterproto2.Message],
) -> tuple[tuple[str, bool, Callable[[Any], bytes]], ...]:
    """Return each field's name, whether it is left out when None (else: when false), and its encoder with the tag."""
    return tuple(
        (
            name,
            meta.optional or (meta.proto_type == betterproto2.TYPE_MESSAGE and not meta.repeated),
            _field(meta),
        )
        for name, meta in message_type._betterproto.meta_by_field_name.items()  # type: ignore[arg-type]  # as above
    )


def _field(meta: betterproto2.FieldMetadata) -> Callable[[Any], bytes]:
    if meta.map_meta is not None:
        key, value = _single(1, meta.map_meta[0].proto_type), _single(2, meta.map_meta[1].proto_type)
        entry = _single(meta.number, betterproto2.TYPE_BYTES)
        return lambda pairs: b"".join([entry(key(k) + value(v)) for k, v in pairs.items()])
    if not meta.repeated:
        return _single(meta.number, meta.proto_type)
    if _wire_type(meta.proto_type) == _VARINT:
        packed = _single(meta.number, betterproto2.TYPE_BYTES)
        return lambda numbers: packed(b"".join(map(_varint_bytes, numbers)))
    encode_one = _single(meta.number, meta.proto_type)
    return lambda values: b"".join(map(encode_one, values))


def _single(number: int, proto_type: str) -> Callable[[Any], bytes]:
    tag = _varint_bytes(number << 3 | _wire_type(proto_type))
    if proto_type == betterproto2.TYPE_STRING:
        return lambda text: _sized(tag, text.encode())
    if proto_type == betterproto2.TYPE_MESSAGE:
        return lambda message: _sized(tag, encode(message))
    if proto_type == betterproto2.TYPE_BYTES:
        return lambda payload: _sized(tag, payload)
    return lambda value: tag + _varint_bytes(value)


def _wire_type(proto_type: str) -> int:
    return (
        _BYTES
        if proto_type in _NESTED
        else _VARINT
        if proto_type == betterproto2.TYPE_ENUM
        else _SCALARS[proto_type][0]
    )


def _sized(tag: bytes, payload: bytes) -> bytes:
    return tag + _varint_bytes(len(payload)) + payload


def _varint_bytes(value: int) -> bytes:
    """Encode a varint; a negative number in two's complement of 64 bits."""
    if 0 <= value < 0x80:
        return _ONE_BYTE[value]
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{value} has more than 64 bits")
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
