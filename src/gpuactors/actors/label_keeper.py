"""The label keeper: reads and patches the label of our Node as it is wanted, and posts that somebody has touched it.

What the watch of the Node shows is a hint and never a fact: it is posted without its content, and the core asks for a
read. Must not decide anything: that the label is not as a patch expects is an answer, and so is a server that is away.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from gpuactors.actors.api_retry import for_ever
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.each_once import each_once, only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.domains.outputs import DomainsWanted, LabelPatchWanted
from gpuactors.core.events import Event
from gpuactors.core.events.domains import LabelPatched, LabelRead, NodeTouched
from gpuactors.core.values.domain import LABEL, LabelChange, NodeLabel
from gpuactors.ports.kube import ApiError, LabelConflict, NodeApi


async def run(
    wanted: LatestReader[DomainsWanted],
    node: NodeApi,
    inbox: trio.MemorySendChannel[Event],
    unwatched: Callable[[str], None],
) -> None:
    """Run for ever. `unwatched` gets the reason each time the Node cannot be watched; it must not raise."""

    async def once(_: None, order: LabelPatchWanted | int) -> Event:
        return await (_read(order, node) if isinstance(order, int) else _patch(order, node))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, node, inbox, unwatched)
        # One of the two at a time: what a read finds beside a patch of ours would be no fact.
        await each_once(wanted, lambda now: only(now.label_patch or now.label_read), once, inbox)


async def _read(number: int, node: NodeApi) -> Event:
    try:
        with raises_only(ApiError, "label_keeper"):
            metadata = await node.read()
    except ApiError as exc:
        return LabelRead(number, str(exc))
    return LabelRead(number, NodeLabel(metadata.labels.get(LABEL)))


async def _patch(order: LabelPatchWanted, node: NodeApi) -> Event:
    number, patch = order.number, order.patch
    is_added = patch.change is LabelChange.ADD
    expected, value = (None, patch.value) if is_added else (patch.value, None)
    try:
        with raises_only(ApiError, "label_keeper"):
            answer = await node.set_label(LABEL, expected=expected, value=value)
    except ApiError as exc:
        return LabelPatched(number, str(exc))
    if isinstance(answer, LabelConflict):
        expected_label = "absent" if is_added else patch.value
        reason = f"it was not {expected_label} any more: somebody else has changed it"
        return LabelPatched(number, reason, conflict=True)
    return LabelPatched(number)


async def _watch(
    node: NodeApi, inbox: trio.MemorySendChannel[Event], unwatched: Callable[[str], None]
) -> None:
    """Post each change of the label, for ever; also when a watch begins, as earlier changes are unknown."""

    async def follow() -> None:
        is_first, last_label = True, None
        async with node.watch_node() as changes:
            async for metadata in changes:
                label = metadata.labels.get(LABEL)
                if is_first or label != last_label:  # what else a Node has changes all the time
                    is_first, last_label = False, label
                    await inbox.send(NodeTouched())

    async def failed(error: ApiError) -> None:
        unwatched(str(error))

    await for_ever("label_keeper", follow, failed)
