"""Waits with a random share, so that what failed, began or was ended together does not come back together.

A file of its own: supervision, retries and watches wait by it."""

from __future__ import annotations

import random


def shorter(plain_s: float, share: float) -> float:
    """Return `plain_s`, less a random part of up to this share."""
    return plain_s * (1 - share * random.random())


def about(plain_s: float, share: float) -> float:
    """Return `plain_s`, give or take a random part of up to this share."""
    return plain_s * (1 + share * (2 * random.random() - 1))
