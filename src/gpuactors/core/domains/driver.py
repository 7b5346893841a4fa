"""The DRA driver of compute domains: channels and daemons.

A file of its own: only it knows both the claiming and the files.
"""

from __future__ import annotations

from typing import Final

from gpuactors.core.claims.driver import Driver
from gpuactors.core.domains.claiming import DomainClaiming
from gpuactors.core.domains.files import DomainFiles
from gpuactors.core.values.claim import ClaimsOf

DOMAINS: Final = Driver(ClaimsOf.DOMAINS, DomainClaiming(), DomainFiles())
