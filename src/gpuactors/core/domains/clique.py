"""The clique of the node's NVLink fabric, `<cluster UUID>.<number>`: the values that each source may give, and the
source that is used.

Unknown is not empty. On a node without such a fabric a channel rightly has no device node; where the clique is unknown,
a container would start without the device node that it needs. So only NVML or the operator can say that there is none:
a missing label says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.values.quote import first_of, quoted, quoted_id

LABEL: Final = "nvidia.com/gpu.clique"
"""On the Node and in the features file: by GPU Feature Discovery, or by NVIDIA's own plugin."""

NO_FABRIC: Final = "none"
"""How an operator says that the node is on no fabric."""

_CLIQUE: Final = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.[0-9]{1,10}")
_NO_CLUSTER: Final = "00000000-0000-0000-0000-000000000000"
"""The cluster of a GPU that has NVLink within its node alone."""

_WHAT_TO_DO: Final = (
    "set --clique to the clique of this node, or to none on nodes without such a fabric; or let GPU Feature Discovery "
    f"label the Node ({LABEL}), or give gpuactors NVML (docs/compute-domains.md)"
)


class Said(Struct, frozen=True, gc=False):
    """The clique by one source."""

    source: str
    """Its name in sentences."""
    clique_id: str | None = None
    """Empty: the node is on no fabric; None: it does not say."""
    why: str = ""
    """Why it does not say, as a part of a sentence."""
    is_last: bool = False
    """It knows better than those after it, and does not know: they are not asked."""
    is_past: bool = False
    """A sign of what another source has said in this boot."""


class CliqueFound(Struct, frozen=True, gc=False):
    """The clique by all of them."""

    clique_id: str = ""
    source: str = ""
    """The source that is used; empty if none is."""
    unknown: str = ""
    """Why it is not known, as a sentence with what to do; empty if it is."""
    is_past: bool = False
    """See `Said.is_past`."""


def parsed(source: str, text: str) -> Said:
    """Parse a source that has a clique as text."""
    if text == NO_FABRIC:
        return Said(source, "")
    found = _CLIQUE.fullmatch(text)
    if found is None:
        return Said(
            source,
            why=f"names the clique {quoted(text)}, which is none: UUID.NUMBER is expected",
            is_last=True,
        )
    return Said(source, "" if found[1] == _NO_CLUSTER else text)


def is_clique(text: str) -> bool:
    """It is `none`, or a clique."""
    return parsed("", text).clique_id is not None


def found_by(said: Iterable[Said]) -> CliqueFound:
    """The first source counts that knows, in the order given."""
    reasons: list[str] = []
    for one in said:
        if one.clique_id is not None:
            return CliqueFound(one.clique_id, one.source, is_past=one.is_past)
        reasons.append(f"{one.source} {one.why}")
        if one.is_last:
            break
    return CliqueFound(
        unknown=f"the clique of this node's NVLink fabric is not known: {'; '.join(reasons)}. To do: {_WHAT_TO_DO}"
    )


# --- signs of what was said ---------------------------------------------------------------------------------------


def remembered(source: str, clique_id: str) -> Said:
    """A source may go while the fabric stays: the Node's label goes when NVIDIA's plugin ends."""
    return Said(f"{source} (as it was read before)", clique_id, is_past=True)


def of_claims(source: str, cliques: Iterable[str]) -> Said:
    """By the files of the daemons' claims that are prepared here: `CLIQUE_ID` of their containers."""
    known = dict.fromkeys(clique_id for clique_id in cliques if clique_id)
    if len(known) > 1:
        return Said(
            source, why=f"name several cliques: {' and '.join(map(quoted_id, first_of(list(known))))}"
        )
    return (
        replace(parsed(source, next(iter(known))), is_past=True)
        if known
        else Said(source, why="do not name it")
    )


# --- what NVML says -------------------------------------------------------------------------------------------------


class GpuFabric(Struct, frozen=True, gc=False):
    """The fabric of one GPU (nvmlGpuFabricInfo_t)."""

    state: str
    """`not supported`, `not started`, `in progress` or `completed`."""
    status: int
    """0: no error of the probe."""
    cluster: str
    """Its UUID."""
    clique: int


def of_gpus(source: str, gpus: Iterable[GpuFabric]) -> Said:
    """The clique of NVML's answers for all GPUs of the host's driver: they must agree."""
    found: dict[str, None] = {}
    for gpu in gpus:
        if gpu.state == "not supported" or (gpu.state == "completed" and gpu.cluster == _NO_CLUSTER):
            found[""] = None
        elif gpu.state != "completed" or gpu.status:
            return Said(
                source,
                why="says that a GPU has not joined its fabric yet "
                f"({quoted_id(gpu.state)}, status {gpu.status})",
                is_last=True,
            )
        else:
            found[f"{gpu.cluster}.{gpu.clique}"] = None
    if len(found) > 1:
        words = " and ".join(quoted_id(one) or "none" for one in first_of(list(found)))
        return Said(source, why=f"names several cliques: {words}", is_last=True)
    if not found:
        return Said(source, why="knows no GPU of the host's driver")
    return parsed(source, next(iter(found)) or NO_FABRIC)
