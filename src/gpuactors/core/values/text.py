"""Text that can be encoded: the journal, protobuf and the log are UTF-8, and the host's names need not be.

A name in sysfs, in /proc or in a path is bytes. Python returns the bytes that are no UTF-8 as lone surrogates (PEP
383), which no encoder takes: one odd driver name stopped the journal and every answer that named it (issue 10). So the
adaptor that reads such a name makes it `encodable` at once, and all text that enters the core is encodable.

A file of its own: every adaptor that reads names of the host uses it.
"""

from __future__ import annotations


def encodable(text: str) -> str:
    r"""Escape the bytes of `text` that are no UTF-8, as `\xff`. Returns the same object if there are none."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        except UnicodeEncodeError:  # a surrogate without a byte
            return text.encode("utf-8", "backslashreplace").decode()
    return text


def cut(text: str, bytes_max: int) -> str:
    """Cut the text at a whole character to at most `bytes_max` bytes of UTF-8, and so to no more characters either."""
    encoded = encodable(text).encode()
    if len(encoded) <= bytes_max:
        return encoded.decode()
    mark = "…"
    return encoded[: bytes_max - len(mark.encode())].decode(errors="ignore") + mark
