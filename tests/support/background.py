"""Work in a thread while a context is open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_background(
    work: Callable[[threading.Event], None], name: str, *, end_s: float = 30.0
) -> Iterator[None]:
    """Does the work while the context is open. It gets an event that is set at the end, and has `end_s` then."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=end_s)
