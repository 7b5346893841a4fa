"""Waits with a random share, so that what failed, began or was ended together does not come back together.

A file of its own: supervision, retries and watches wait by it."""

from __future__ import annotations

import random


def shorter(plain_s: float, share: float) -> float:
    """`plain_s`, or up to this share of it less."""
    return plain_s * (1 - share * random.random())


def about(plain_s: float, share: float) -> float:
    """`plain_s`, give or take this share of it."""
    return plain_s * (1 + share * (2 * random.random() - 1))
