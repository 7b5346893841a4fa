"""JSON from outside becomes values here: the API server's answers, the parameters in a claim, kubelet's ledger file,
the checkpoints of claims, the files of the state directory.

Decoders are recursive. What nests deeper than they go raises RecursionError in the task that decodes, which ends the
daemon: a claim of 4 kB that anybody may create did so. So the depth is counted first, without recursion, and whatever
is wrong with the bytes is one error. Must not know what the values mean.
"""

from __future__ import annotations

import json
import re
from typing import Final, NoReturn, TypeVar

import msgspec

T = TypeVar("T")

DEPTH_MAX: Final = 512
"""Objects and arrays within each other. Kubernetes' own objects have some 20; the interpreter's limit is 1,000 calls,
of which the daemon itself has some 60 at most."""

_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""One without an end goes up to the end: else each quote in it would be tried as the beginning of another one."""

_ESCAPES: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""Of a string. A backslash that is escaped itself begins none."""

_NESTING: Final = re.compile(rb"[\[{]+|[\]}]+")

_STRING_OR_BRACKET: Final = re.compile(_STRING.pattern + rb"|[\[{\]}]", re.DOTALL)


class UndecodableError(ValueError):
    """The bytes are not what they should be; the text says how, as a part of a sentence."""


class TooDeepError(UndecodableError):
    """They nest deeper than is decoded."""


def decode_json(content: bytes | msgspec.Raw, kind: type[T], depth_max: int = DEPTH_MAX) -> T:
    """The content as a value of this type. Raises UndecodableError for every content that is none."""
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
    """The values that stand one after the other, as far as they can be read."""
    found: list[object] = []
    try:
        text = _ESCAPES.sub(_without_half, without_deep(content, depth_max)).decode()
        at = _end_of_blanks(text, 0)
        while at < len(text):
            value, end = _DECODER.raw_decode(text, at)
            found.append(value)
            at = _end_of_blanks(text, end)
    except ValueError:
        pass
    return found


def _end_of_blanks(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return match.end() if match is not None else at


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_BLANKS: Final = re.compile(r"\s*")
_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)
"""For streams, which the other one does not know. It goes as deep."""


def without_deep(content: bytes, depth_max: int = DEPTH_MAX) -> bytes:
    """The content with `null` for each object and array that nests deeper. For what others may nest as they like in an
    object that is needed: the parameters in a claim for another driver."""
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
    """`\\ufffd`, the replacement character, for a half of a surrogate pair that stands alone. Whoever makes a claim can
    write one, also in the parameters of another driver, and the decoder refuses all of the claim for it."""
    return rb"\ufffd" if escape["half"] else escape[0]


def _is_deeper(content: bytes, depth_max: int) -> bool:
    """Count the opening brackets first, which is quick: there are no fewer than the depth."""
    return content.count(b"{") + content.count(b"[") > depth_max and _depth(content) > depth_max


def _depth(content: bytes) -> int:
    """How deep objects and arrays are within each other. Of what is no JSON no less than a decoder would go."""
    deepest = now = 0
    for match in _NESTING.finditer(_STRING.sub(b"", content)):
        run = match[0]
        now += len(run) if run[0] in b"[{" else -len(run)
        deepest = max(deepest, now)
    return deepest
