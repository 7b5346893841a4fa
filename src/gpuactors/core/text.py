"""Text that can be written down: the journal, protobuf and the log are UTF-8, and the host's names need not be.

A name in sysfs, in /proc or in a path is bytes. Python hands out what of them is no UTF-8 as lone surrogates (PEP 383),
which no encoder takes: one odd driver name stopped the journal and every answer that named it (issue 10). So whoever
reads such a name makes it `encodable` there and then, and what enters the core is.
"""

from __future__ import annotations


def encodable(text: str) -> str:
    r"""`text` with what is no UTF-8 as an escape, `\xff`; the same object where there is nothing of it."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        except UnicodeEncodeError:  # a surrogate that stands for no byte
            return text.encode("utf-8", "backslashreplace").decode()
    return text
