"""A model of kubelet 1.36's device manager that speaks the real protocol: the node's kubelet in `gpuactors simulate`,
in the tests and in `replay`.

Three parts, each in its own file: the bookkeeping (`kubelet_books.py`, no clock, no tasks), the plugins
(`kubelet_plugins.py`) and the pods (`kubelet_pods.py`). Here is the life of the process: start, stop, what survives a
restart (the ledger, the pods), and what can be seen from outside. Must not decide anything by itself.

What the model leaves out: the delay of a node status update (kubelet posts capacity every 10 s; here the scheduler sees
it at once), the topology manager, several containers in a pod, PodResources, and a reboot of the node.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import trio

from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.kubelet.grpc_trio import Server
from gpuactors.simulation.kubelet_books import BooksView, KubeletBooks, KubeletPanicError, Phase, Pod
from gpuactors.simulation.kubelet_plugins import PluginManager
from gpuactors.simulation.kubelet_pods import PodWorker
from gpuactors.simulation.kubelet_transport import KubeletTransport

CHECKPOINT_FILE: Final = "kubelet_internal_checkpoint"
"""File name of kubelet's ledger in its device-plugins directory."""

DRAIN_S: Final = 0.1
"""Kubelet does not end its registration service gracefully; this only bounds the last bytes."""

_TRANSITIONAL: Final = frozenset({Phase.PENDING, Phase.ADMITTING, Phase.STARTING})


@dataclass(eq=False, slots=True)
class _Life:
    """One process of kubelet."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)
    plugins: PluginManager | None = None


@asynccontextmanager
async def open_fake_kubelet(
    transport: KubeletTransport, *, seed: int = 0, checkpoint: Path | None = None
) -> AsyncIterator[FakeKubelet]:
    """A kubelet that is not started yet; it ends with the context.

    `seed` orders what kubelet has in no order. `checkpoint` is the ledger's file; None writes none.
    """
    async with trio.open_nursery() as nursery:
        yield FakeKubelet(transport, nursery, seed=seed, checkpoint=checkpoint)
        nursery.cancel_scope.cancel()


@final
class FakeKubelet:
    """Made by `open_fake_kubelet`. The ledger and the pods outlive `stop` and `start`; nothing else does."""

    def __init__(
        self, transport: KubeletTransport, nursery: trio.Nursery, *, seed: int, checkpoint: Path | None
    ) -> None:
        self._transport = transport
        self._nursery = nursery
        self._rng = random.Random(seed)
        self._books = KubeletBooks(self._rng)
        self._view = Latest(self._books.view(trio.current_time()))
        self._checkpoint = checkpoint
        self._checkpointed = ""
        self._life: _Life | None = None
        self.panics: list[str] = []
        """Where kubelet's process ended by a crash."""

    # --- the process --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts kubelet: removes the sockets of its directory, listens, has no device of any plugin.

        Raises `RuntimeError` if it runs, `OSError` if its socket cannot be made.
        """
        if self._life is not None:
            raise RuntimeError("kubelet runs already; stop it first")
        await self._nursery.start(self._live)

    async def stop(self) -> None:
        """Kubelet's process ends at once; its socket's file stays, as after a crash. Pods run on.

        Raises `RuntimeError` if it does not run.
        """
        if self._life is None:
            raise RuntimeError("kubelet does not run; start it first")
        life = self._life
        life.scope.cancel()
        await life.ended.wait()

    async def _live(self, *, task_status: trio.TaskStatus[None]) -> None:
        life = _Life()
        try:
            with life.scope:
                await self._serve(life, task_status)
        except* KubeletPanicError as panic:
            self.panics.extend(str(error) for error in _leaves(panic))
        finally:
            self._life = None
            self._books.halt()
            self._publish()
            life.ended.set()

    async def _serve(self, life: _Life, task_status: trio.TaskStatus[None]) -> None:
        async with self._transport.listen() as listener, trio.open_nursery() as nursery:
            plugins = PluginManager(self._books, self._transport, nursery, self._publish)
            pods = PodWorker(self._books, plugins, nursery, self._publish, self._rng)
            again = self._books.boot(trio.current_time())
            await nursery.start(Server([plugins], drain_s=DRAIN_S).serve, listener)
            nursery.start_soon(pods.run, again, self._view.subscribe())
            nursery.start_soon(plugins.expire_later)
            life.plugins = plugins
            self._life = life
            self._publish()
            task_status.started()

    def lose_stream(self, resource: str) -> None:
        """The connection to a resource's plugin breaks. Raises `KeyError` if there is none."""
        if self._life is None or self._life.plugins is None:
            raise KeyError(resource)
        self._life.plugins.lose_stream(resource)

    # --- pods ---------------------------------------------------------------------------------------------------

    def submit(self, name: str, requests: Mapping[str, int]) -> Pod:
        """Creates a pod that asks for devices: it runs as soon as there is room for it. Raises `ValueError`."""
        pod = self._books.submit(name, requests, trio.current_time())
        self._publish()
        return pod

    async def admit(self, name: str, requests: Mapping[str, int]) -> Pod:
        """Creates a pod and waits until it runs, fails, waits for room, or is held up at its container's start."""
        self.submit(name, requests)
        return await self.settled(name)

    async def settled(self, name: str) -> Pod:
        """Waits until something can be said of a pod. Raises `KeyError` if it is deleted meanwhile."""
        async for view in self._view.subscribe():
            pod = view.pods[name]
            if pod.phase not in _TRANSITIONAL or pod.message:
                return pod
        raise AssertionError("unreachable: a subscription never ends")

    def delete(self, name: str) -> None:
        """A pod ends. Raises `KeyError` if there is no such pod."""
        self._books.delete(name)
        self._publish()

    # --- what can be seen ---------------------------------------------------------------------------------------

    @property
    def view(self) -> BooksView:
        """The books as they are now."""
        return self._view.value

    def changes(self) -> LatestReader[BooksView]:
        """The books as they are now, and after every change."""
        return self._view.subscribe()

    async def until(self, condition: Callable[[BooksView], bool]) -> BooksView:
        """The first books from now on for which `condition` holds. Waits for ever; the caller has a deadline."""
        async for view in self._view.subscribe():
            if condition(view):
                return view
        raise AssertionError("unreachable: a subscription never ends")

    def _publish(self) -> None:
        self._view.set(self._books.view(trio.current_time()))
        if self._checkpoint is not None:
            self._write_checkpoint(self._checkpoint)

    def _write_checkpoint(self, path: Path) -> None:
        text = self._books.checkpoint()
        if text == self._checkpointed:
            return
        draft = path.with_name(path.name + ".new")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
        self._checkpointed = text


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves
