"""How an input is damaged."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any, Final

Damage = Callable[[random.Random, bytes], bytes]

_ODD: Final = (
    b"\x00", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b'"', b"{", b"[", b"}", b"]", b",", b":", b"\n", b"\r\n",
    b"\x1b[31m", "\u202e".encode(), b"1e999", b"-0", b"9" * 400, b"9" * 5000, b"NaN", b"null", b"!!", b"&a",
    b"*a", b"<<",
    b"\xf4\x90\x80\x80", b"%s", b"../", b" ", b"\t", b"=", b"@", b"-", b"0x", "\u0663".encode(), "\u00b2".encode(),
)  # fmt: skip
"""What somebody's parser trips over."""

_DEPTHS: Final = (20, 33, 70, 300, 511, 512, 513, 900, 1100, 5000, 20000)

_SCALARS: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, 1e308, -0.0, "", "x",
    "\ud800", "\udfff\ud800",
    "\x00", "\u202e", "x" * 300, "x" * 70_000, "0000:23:00.0", "10de", "\u0663", "nan", [], {}, [[]], [None],
    {"": None},
    {"\ud800": "\ud800"}, [{}] * 40, "gpu.nvidia.com", "../../etc",
)  # fmt: skip


def of_bytes(draw: random.Random, content: bytes) -> bytes:
    """Some bytes are changed, cut, doubled, moved or put in."""
    found = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at, to = sorted((draw.randint(0, len(found)), draw.randint(0, len(found))))
        match draw.randrange(7):
            case 0 if found:
                found[min(at, len(found) - 1)] = draw.randrange(256)
            case 1:
                del found[at : min(to, at + 64)]
            case 2:
                found[at:at] = draw.choice(_ODD)
            case 3:
                found[at:at] = found[at:to][:4096]
            case 4:
                del found[at:]
            case 5:
                found[at:at] = draw.choice(
                    (b"[", b"{", b'{"a":', b"(", b"- ", b"\x0a\x80", b'"', b"\\")
                ) * draw.choice(_DEPTHS)
            case _:
                found[at:to] = draw.choice(_ODD)
    return bytes(found)


def of_json(draw: random.Random, content: bytes) -> bytes:
    """Values have other types and sizes, names are changed, missing or there twice, and what nests nests deeper."""
    try:
        root = [json.loads(content)]
    except ValueError:
        return of_bytes(draw, content)
    for _ in range(draw.choice((1, 1, 2, 3))):
        _change(draw, draw.choice(_places(root)))
    text = json.dumps(root[0], ensure_ascii=draw.random() < 0.7)
    if draw.random() < 0.1:
        text = _with_a_name_twice(draw, text)
    deep = text.replace('"@deep"', _deep(draw))
    encoded = deep.encode("utf-8", "surrogatepass")
    return of_bytes(draw, encoded) if draw.random() < 0.1 else encoded


Place = tuple[Any, Any]


def _places(root: list[Any]) -> list[Place]:
    """Each container with each of its keys."""
    found: list[Place] = []
    left: list[Any] = [root]
    while left:
        now = left.pop()
        keys = range(len(now)) if isinstance(now, list) else list(now)
        for key in keys:
            found.append((now, key))
            if isinstance(now[key], list | dict):
                left.append(now[key])
    return found


def _change(draw: random.Random, place: Place) -> None:
    within, key = place
    match draw.randrange(7):
        case 0 | 1 | 2:
            within[key] = copy.deepcopy(draw.choice(_SCALARS))
        case 3:
            within[key] = "@deep"
        case 4 if isinstance(within, dict):
            within[draw.choice(("\ud800", "", "x", "name", "uid", "kind", str(key).upper()))] = within.pop(
                key
            )
        case 5 if isinstance(within[key], list) and within[key]:
            within[key] = within[key] * draw.choice((2, 30, 300))
        case 6 if isinstance(within[key], str):
            at = draw.randint(0, len(within[key]))
            odd = draw.choice(("\ud800", "\x00", "\n", "'", "/", "..", "\u202e", "x" * 400, "=", ","))
            within[key] = within[key][:at] + odd + within[key][at:]
        case _ if isinstance(within, dict):
            del within[key]
        case _:
            within[key] = [within[key]]


def _with_a_name_twice(draw: random.Random, text: str) -> str:
    at = text.find("{", draw.randint(0, len(text)))
    name = draw.choice(("metadata", "name", "uid", "spec", "status", "Data", "resources", "kind"))
    return (
        text if at < 0 else f'{text[: at + 1]}"{name}": {json.dumps(draw.choice(_SCALARS))}, {text[at + 1 :]}'
    )


def _deep(draw: random.Random) -> str:
    depth = draw.choice(_DEPTHS)
    match draw.randrange(3):
        case 0:
            return "[" * depth + "]" * depth
        case 1:
            return '{"a":' * depth + "0" + "}" * depth
        case _:
            return '[{"metadata":' * depth + '"x' + "}]" * depth  # and an end is missing
