"""Waits with a random share, so that clients that failed or started together do not retry together.

A file of its own: supervision, retries and watches use it."""

from __future__ import annotations

import random


def shorter(plain_s: float, share: float) -> float:
    """Return `plain_s` less a random part of up to `share` of it."""
    return plain_s * (1 - share * random.random())


def about(plain_s: float, share: float) -> float:
    """Return `plain_s` plus or minus a random part of up to `share` of it."""
    return plain_s * (1 + share * (2 * random.random() - 1))
