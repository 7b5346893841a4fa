"""The channel of a compute domain goes from a pod that was deleted by force to its successor (NVIDIA issue 641)."""

from __future__ import annotations

import random
from typing import Final

import trio

from gpuactors_simulation.domains import DOMAIN
from gpuactors_simulation.expectations import Runs
from gpuactors_simulation.expectations_claims import Found, NothingLeft, PreparedOn, WaitsFor
from gpuactors_simulation.expectations_domains import ImexOffered, LabelWas, Lacks, Says
from gpuactors_simulation.kube.domain_objects import CHANNEL, DAEMON
from gpuactors_simulation.kubelet.pods import RELEASE_S
from gpuactors_simulation.scenarios.parts import Act, start_node
from gpuactors_simulation.script import Scenario, Step
from gpuactors_simulation.world import World

_TEXT: Final = """
The pods of a job share GPU memory between nodes by IMEX: each has a claim for a channel of the job's ComputeDomain. The
label resource.nvidia.com/computeDomain of the node says which domain it takes part in, and by that NVIDIA's controller
runs the domain's daemon there.

In NVIDIA's issue 641 a pod was deleted by force. The claim of its successor was prepared at 40.462 s, and the old
claim unprepared at 41.014 s: that removed the label under the new pod. The daemon ended, did not come back, and the job
failed with CUDA_ERROR_NOT_SUPPORTED. Kubelet sends the two calls in no order, so it is the driver that must not let the
label go.
"""

PREPARE_AT_S: Final = 40.462
UNPREPARE_AT_S: Final = 41.014
"""The times of issue 641. What is between them is played."""

_CHANNELS: Final = frozenset({CHANNEL})
_DAEMONS: Final = frozenset({DAEMON})
_FIRST_DAEMON: Final = f"{DOMAIN}-daemon-1"
_SET: Final = LabelWas((None, DOMAIN))

_ANSWERED_S: Final = 120.0
"""Kubelet repeats a prepare that was refused after 60 to 90 s: it is refused if the step before was read for more than
35 s."""


def _steps(_rng: random.Random) -> tuple[Step, ...]:
    old, new = "job-1", "job-2"
    old_claim, new_claim = _claim_of(old), _claim_of(new)
    old_is_prepared = PreparedOn(old_claim, _CHANNELS)
    times = _Times()
    return (
        Step(
            "The node starts, on a fabric with IMEX",
            "It offers one channel, and the device of a domain's daemon. No pod takes part in a domain, so the node "
            "has no label.",
            start_node(),
            (Found(), ImexOffered((CHANNEL, DAEMON)), LabelWas((None,)), Says("")),
        ),
        Step(
            "The first pod of the job comes; NVIDIA's controller is slow",
            "The channel is the claim's own and that is on disk, then the node gets the label. The prepare waits in "
            "its call until the domain's daemon has its claim here, and says so.",
            _start(old, controller_is_slow=True),
            (
                Lacks(old_claim, (f"the daemon of the ComputeDomain default/{DOMAIN}", "no prepared claim")),
                _SET,
                Says(""),
            ),
        ),
        Step(
            "The controller goes on",
            "It starts the daemon's pod by the label. The daemon's claim is prepared while the channel's waits, the "
            "domain says that the node is Ready, and the pod of the job runs.",
            _go_on,
            (
                PreparedOn(_FIRST_DAEMON, _DAEMONS),
                Says("Ready"),
                old_is_prepared,
                Runs(old),
                Runs(_FIRST_DAEMON),
                _SET,
            ),
            _ANSWERED_S,
        ),
        Step(
            f"The pod is deleted by force; its successor's claim is to be prepared ({PREPARE_AT_S:.3f} s)",
            "The old container still runs, and kubelet has not unprepared its claim. The new prepare waits in its "
            "call, and says for whom.",
            _replace_by_force(old, new, times),
            (WaitsFor(new_claim, old_claim), Runs(_FIRST_DAEMON), _SET),
        ),
        Step(
            f"The old claim is unprepared ({UNPREPARE_AT_S:.3f} s)",
            "That is 0.552 s after the new prepare came. It is answered when the channel is free, the label was never "
            "away, and the daemon is the same one.",
            _end_old(old, times),
            (
                PreparedOn(new_claim, _CHANNELS),
                PreparedOn(_FIRST_DAEMON, _DAEMONS),
                Runs(new),
                Runs(_FIRST_DAEMON),
                Says("Ready"),
                _SET,
            ),
            _ANSWERED_S,
        ),
        Step(
            "The job ends",
            "Its last claim and its ComputeDomain are deleted. The label goes with the domain, as no other claim can "
            "follow, and with the label the domain's daemon.",
            _end(new),
            (LabelWas((None, DOMAIN, None)), Says(""), ImexOffered((CHANNEL, DAEMON)), NothingLeft()),
        ),
    )


class _Times:
    """When the new claim's prepare came, on trio's clock."""

    prepare_at = 0.0


def _claim_of(pod: str) -> str:
    return f"{pod}-channel"


def _start(pod: str, *, controller_is_slow: bool = False) -> Act:
    async def act(world: World) -> None:
        if controller_is_slow:
            world.domains.controller.hold()
        world.domains.allocate(_claim_of(pod))
        world.kubelet.submit(pod, {}, uses=(_claim_of(pod),))

    return act


async def _go_on(world: World) -> None:
    world.domains.controller.go_on()


def _replace_by_force(old: str, new: str, times: _Times) -> Act:
    async def act(world: World) -> None:
        world.force_delete_pod(old)
        world.domains.delete(_claim_of(old))
        await _start(new)(world)
        times.prepare_at = trio.current_time()

    return act


def _end_old(old: str, times: _Times) -> Act:
    """Its container ends; kubelet unprepares the claim 0.1 s after that."""

    async def act(world: World) -> None:
        await trio.sleep_until(times.prepare_at + UNPREPARE_AT_S - PREPARE_AT_S - RELEASE_S)
        world.end_process(old)

    return act


def _end(pod: str) -> Act:
    async def act(world: World) -> None:
        world.end_pod(pod)
        await world.until(lambda view: pod not in view.pods, f"{pod} is gone")
        world.domains.delete(_claim_of(pod))
        world.domains.end()

    return act


COMPUTE_DOMAIN: Final = Scenario(
    "compute-domain",
    "An IMEX channel goes from a pod deleted by force to its successor; the label stays.",
    _TEXT,
    _steps,
    domains=True,
)
