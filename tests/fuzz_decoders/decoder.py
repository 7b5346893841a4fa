"""What a decoder is to the fuzzer, and what its decoders share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from gpuactors.core.claims.opaque_config import ConfigFault
from tests.fuzz_decoders.damage import Damage, of_json

T = TypeVar("T")

SENTENCE_MAX_CHARS: Final = 4096
"""Of an error's text: it goes to the log, to kubelet and to the API server."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """One place where bytes become values."""

    name: str
    inputs: tuple[bytes, ...]
    """Real ones."""
    decode: Callable[[bytes], object]
    """Everything that is made of them before a decision is."""
    errors: tuple[type[Exception], ...] = ()
    """Its own."""
    damage: Damage = of_json
    weight: int = 10
    """How often, in comparison with the others."""


def sentence(said: object) -> None:
    """What is said of an input can be encoded, and is short."""
    if isinstance(said, str | Exception | ConfigFault):
        text = str(said)
        text.encode()
        assert len(text) <= SENTENCE_MAX_CHARS, f"a sentence of {len(text):,} characters: {text[:200]}"


def of_text(parse: Callable[[str], object]) -> Callable[[bytes], None]:
    """What parses text, of which the bytes are made in both ways."""

    def parsed(content: bytes) -> None:
        parse(content.decode("utf-8", errors="replace"))
        parse(content.decode("utf-8", errors="surrogateescape"))

    return parsed


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast("T", done.value)
    coroutine.close()
    raise AssertionError("it waits for something")


class Stream:
    """A connection on which the input comes, in pieces."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.sent = b""

    async def receive_some(self, bytes_max: int) -> bytes:
        piece, self._content = self._content[:bytes_max], self._content[bytes_max:]
        return piece

    async def send_all(self, data: bytes) -> None:
        self.sent += data
