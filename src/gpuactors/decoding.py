"""Decodes JSON from outside: the API server's answers, the parameters in a claim, kubelet's ledger file, checkpoints of
claims, the files of the state directory.

Decoders are recursive: content that nests too deep raises RecursionError, which ended the daemon by a claim of 4 kB
that anybody may create. So the depth is counted first, without recursion, and every fault of the bytes is one error.
Must not know what the values mean.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Final, NoReturn, TypeVar

import msgspec

T = TypeVar("T")

DEPTH_MAX: Final = 512
"""Levels of objects and arrays. Kubernetes' own objects have some 20; the interpreter allows 1,000 calls, of which the
daemon itself uses at most some 60."""

_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A string. An unterminated one extends to the end of the content, so that its quotes are not tried as new strings."""

_ESCAPES: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""An escape sequence, or a pair of them for a surrogate pair; `half`: half of a pair that stands alone."""

_STEPS: Final = {ord(bracket): 1 if bracket in "[{" else -1 for bracket in "[{]}"}
"""The change of the depth at a bracket."""

_OTHERS: Final = bytes(set(range(256)) - _STEPS.keys())
"""Every byte that is no bracket."""

_STRING_OR_BRACKET: Final = re.compile(_STRING.pattern + rb"|[\[{\]}]", re.DOTALL)


class UndecodableError(ValueError):
    """The bytes are not what they should be; the text says how, as a part of a sentence."""


class TooDeepError(UndecodableError):
    """The values nest deeper than the limit."""


def decode_json(content: bytes | msgspec.Raw, kind: type[T], depth_max: int = DEPTH_MAX) -> T:
    """Decode the content as a value of `kind`. Raises UndecodableError if it is none."""
    content = bytes(content)
    if _is_deeper(content, depth_max):
        raise TooDeepError(f"it nests deeper than {depth_max} levels")
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        whole = _ESCAPES.sub(_without_half, content)
        if whole == content:
            raise UndecodableError(str(error)) from None
    return decode_json(whole, kind, depth_max)


def decode_json_stream(content: bytes, depth_max: int = DEPTH_MAX) -> list[object]:
    """Decode a sequence of values, up to the first that is invalid."""
    values: list[object] = []
    try:
        text = _ESCAPES.sub(_without_half, without_deep(content, depth_max)).decode()
        at = _end_of_blanks(text, 0)
        while at < len(text):
            value, end = _DECODER.raw_decode(text, at)
            values.append(value)
            at = _end_of_blanks(text, end)
    except ValueError:
        pass
    return values


def _end_of_blanks(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return match.end() if match is not None else at


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_BLANKS: Final = re.compile(r"\s*")
_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)
"""Decodes sequences of values, which msgspec does not."""


def without_deep(content: bytes, depth_max: int = DEPTH_MAX) -> bytes:
    """Replace each object and array below `depth_max` by `null`. For needed objects with parts that others may nest at
    will: the parameters in a claim for another driver."""
    if not _is_deeper(content, depth_max):
        return content
    kept: list[bytes] = []
    depth = begin = 0
    for match in _STRING_OR_BRACKET.finditer(content):
        if match[0] in b"[{":
            depth += 1
            if depth == depth_max + 1:
                kept += [content[begin : match.start()], b"null"]
                begin = len(content)
        elif match[0] in b"]}":
            if depth == depth_max + 1:
                begin = match.end()
            depth -= 1
    return b"".join([*kept, content[begin:]])


def _without_half(escape: re.Match[bytes]) -> bytes:
    """Replace half of a surrogate pair by `\\ufffd`: anybody can write one in a claim, even in parameters of another
    driver, and the decoder would refuse the whole claim."""
    return rb"\ufffd" if escape["half"] else escape[0]


def _is_deeper(content: bytes, depth_max: int) -> bool:
    """Return whether the content nests deeper; the number of opening brackets, an upper bound, is counted first."""
    return content.count(b"{") + content.count(b"[") > depth_max and _depth(content) > depth_max


def _depth(content: bytes) -> int:
    """Return the depth of objects and arrays; for invalid JSON at least as deep as a decoder would go."""
    brackets = _STRING.sub(b"", content).translate(None, _OTHERS)
    return max(accumulate(map(_STEPS.__getitem__, brackets), initial=0))
