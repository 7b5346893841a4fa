"""The part of the core that a daemon without claims does not import."""

from __future__ import annotations

import re
from typing import Final

ABOUT_CLAIMS: Final = re.compile(
    r"gpuactors\.core\.(claims|domains|dra|drivers|gpus|events\.(claims|domains)"
    r"|state\.(claims|domains|gpus|offered)"
    r"|values\.(claim_states|domain|domain_reservation|offered_domains|prebound))\b"
)
"""By the names of its modules."""
