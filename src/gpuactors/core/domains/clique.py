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
"""The label on the Node and in the features file, by GPU Feature Discovery or NVIDIA's own plugin."""

NO_FABRIC: Final = "none"
"""The operator's value for a node that is on no fabric."""

_CLIQUE: Final = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.[0-9]{1,10}")
_NO_CLUSTER: Final = "00000000-0000-0000-0000-000000000000"
"""The cluster of a GPU that has NVLink within its node alone."""

_WHAT_TO_DO: Final = (
    "set --clique to the clique of this node, or to none on nodes without such a fabric; or let GPU Feature Discovery "
    f"label the Node ({LABEL}), or give gpuactors NVML (docs/dra.md#compute-domains-imex-channels-as-claims)"
)


class Said(Struct, frozen=True, gc=False):
    """The answer of one source about the clique."""

    source: str
    """The source's name in sentences."""
    clique_id: str | None = None
    """The clique; empty if the node is on no fabric, None if the source does not say."""
    why: str = ""
    """Why it does not say, as a part of a sentence."""
    is_last: bool = False
    """True if no later source is asked: this one knows better than they do, and does not say."""
    is_past: bool = False
    """True if the answer is what another source said earlier in this boot."""


class CliqueFound(Struct, frozen=True, gc=False):
    """The clique by all sources."""

    clique_id: str = ""
    source: str = ""
    """The source that is used; empty if none is."""
    unknown: str = ""
    """Why the clique is not known, and what to do, as sentences; empty if it is known."""
    is_past: bool = False
    """The same as `Said.is_past`."""


def parsed(source: str, text: str) -> Said:
    """Parse a source that has a clique as text."""
    if text == NO_FABRIC:
        return Said(source, "")
    matched = _CLIQUE.fullmatch(text)
    if matched is None:
        return Said(
            source,
            why=f"names the clique {quoted(text)}, which is none: UUID.NUMBER is expected",
            is_last=True,
        )
    return Said(source, "" if matched[1] == _NO_CLUSTER else text)


def is_clique(text: str) -> bool:
    """Return whether the text is `none`, or a clique."""
    return parsed("", text).clique_id is not None


def found_by(answers: Iterable[Said]) -> CliqueFound:
    """Return the answer of the first source that knows, in the order given."""
    reasons: list[str] = []
    for answer in answers:
        if answer.clique_id is not None:
            return CliqueFound(answer.clique_id, answer.source, is_past=answer.is_past)
        reasons.append(f"{answer.source} {answer.why}")
        if answer.is_last:
            break
    return CliqueFound(
        unknown=f"the clique of this node's NVLink fabric is not known: {'; '.join(reasons)}. To do: {_WHAT_TO_DO}"
    )


# --- signs of what was said ---------------------------------------------------------------------------------------


def remembered(source: str, clique_id: str) -> Said:
    """Make the answer of a source that has gone while the fabric stays: the Node's label goes when NVIDIA's plugin
    ends."""
    return Said(f"{source} (as it was read before)", clique_id, is_past=True)


def of_claims(source: str, cliques: Iterable[str]) -> Said:
    """Read the clique from the files of the daemons' claims that are prepared here: `CLIQUE_ID` of their containers."""
    clique_ids = dict.fromkeys(clique_id for clique_id in cliques if clique_id)
    if len(clique_ids) > 1:
        return Said(
            source, why=f"name several cliques: {' and '.join(map(quoted_id, first_of(list(clique_ids))))}"
        )
    return (
        replace(parsed(source, next(iter(clique_ids))), is_past=True)
        if clique_ids
        else Said(source, why="do not name it")
    )


# --- what NVML says -------------------------------------------------------------------------------------------------


class GpuFabric(Struct, frozen=True, gc=False):
    """The fabric of one GPU (nvmlGpuFabricInfo_t)."""

    state: str
    """The state of its fabric: `not supported`, `not started`, `in progress` or `completed`."""
    status: int
    """The status of the probe; 0 without an error."""
    cluster: str
    """The UUID of the cluster."""
    clique: int


def of_gpus(source: str, gpus: Iterable[GpuFabric]) -> Said:
    """Return the clique of NVML's answers for all GPUs of the host's driver: they must agree."""
    clique_ids: dict[str, None] = {}
    for gpu in gpus:
        if gpu.state == "not supported" or (gpu.state == "completed" and gpu.cluster == _NO_CLUSTER):
            clique_ids[""] = None
        elif gpu.state != "completed" or gpu.status:
            return Said(
                source,
                why="says that a GPU has not joined its fabric yet "
                f"({quoted_id(gpu.state)}, status {gpu.status})",
                is_last=True,
            )
        else:
            clique_ids[f"{gpu.cluster}.{gpu.clique}"] = None
    if len(clique_ids) > 1:
        words = " and ".join(quoted_id(clique_id) or "none" for clique_id in first_of(list(clique_ids)))
        return Said(source, why=f"names several cliques: {words}", is_last=True)
    if not clique_ids:
        return Said(source, why="knows no GPU of the host's driver")
    return parsed(source, next(iter(clique_ids)) or NO_FABRIC)
