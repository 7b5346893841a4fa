"""Bugs to plant in the DRA plugin, as `mutations.py`. Few histories can show them: they are about real sockets, and
about what kubelet makes of an answer."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

PREPARE: Final = "tests/kubelet/dra/test_prepare.py"
REGISTRATION: Final = "tests/kubelet/dra/test_registration.py"
HEALTH: Final = "tests/kubelet/dra/test_health.py"
OFFER: Final = "tests/core/gpus/test_offer.py"
DRIVERS: Final = "tests/simulation/kubelet/dra/test_drivers.py"
RESTART: Final = "tests/core/claims/test_restart.py"
RELAY: Final = "tests/actors/test_relay.py"
SUCCESSOR: Final = "tests/kubelet/dra/test_successor.py"

DRA_PLUGIN: Final = (
    Mutation(
        "the claims of a pod beside a failed one are answered with devices",
        "kubelet/dra/service.py",
        "        if failed is None:\n",
        "        if failed is None or len(claims) > 1:\n",
        tests=(PREPARE,),
    ),
    Mutation(
        "the claims of a pod wait for each other",
        "kubelet/dra/service.py",
        "nursery.start_soon(ask_one, ",
        "await ask_one(",
        tests=(PREPARE,),
    ),
    Mutation(
        "a refusal without a reason is a success to kubelet",
        "kubelet/dra/service.py",
        "encodable(answer.reason) or f",
        'encodable(answer.reason) or "" and f',
        tests=(PREPARE,),
    ),
    Mutation(
        "a claim's UID becomes a path as it comes",
        "kubelet/dra/service.py",
        "    if not is_uid(claim.uid):\n",
        "    if not claim.uid:\n",
        tests=(PREPARE,),
    ),
    Mutation(
        "the registration's socket is there before the API's",
        "kubelet/dra/plugin.py",
        "        for one in (self._api, self._registration):\n            if not",
        "        for one in (self._registration, self._api):\n            if not",
        tests=(REGISTRATION,),
    ),
    Mutation(
        "everything that is cancelled at once ends in any order",
        "kubelet/dra/plugin.py",
        "        with trio.CancelScope(shield=True) as scope:\n",
        "        with trio.CancelScope() as scope:\n",
        tests=(REGISTRATION,),
    ),
    Mutation(
        "the API's socket goes before the registration's",
        "kubelet/dra/plugin.py",
        "        await self._registration.close()\n        await self._api.close()\n",
        "        await self._api.close()\n        await self._registration.close()\n",
        tests=(REGISTRATION,),
    ),
    Mutation(
        "a plugin that ends is deregistered under the calls in flight",
        "kubelet/dra/plugin.py",
        "            await self._api.server.wait_idle()\n",
        "            pass\n",
        tests=(DRIVERS,),
    ),
    Mutation(
        "a socket that is made again ends the calls on the old one",
        "kubelet/dra/plugin.py",
        "            await before.aclose()\n",
        "            await before.aclose()\n            [scope.cancel() for scope in list(self._scopes)]\n",
        tests=(REGISTRATION,),
    ),
    Mutation(
        "a bug behind kubelet's verdict deregisters the plugin",
        "kubelet/dra/registration.py",
        "        except Exception as exc:\n",
        "        except ZeroDivisionError as exc:\n",
        tests=(REGISTRATION,),
    ),
    Mutation(
        "a list of health is sent when it changes, and not again",
        "kubelet/dra/health.py",
        "            with trio.move_on_after(limits.HEALTH_AGAIN_S):\n",
        "            with trio.CancelScope():\n",
        tests=(HEALTH,),
    ),
    Mutation(
        "one stream takes the lists from the others",
        "kubelet/dra/health.py",
        "async def _lists(health: HealthReader) -> AsyncGenerator[Sequence[DeviceHealth], None]:\n",
        "_SHARED: dict[object, HealthReader] = {}\n\n\n"
        "async def _lists(health: HealthReader) -> AsyncGenerator[Sequence[DeviceHealth], None]:\n"
        "    health = _SHARED.setdefault(health._latest, health)\n",
        tests=(HEALTH,),
    ),
    Mutation(
        "a claimed GPU that has lost its driver is healthy",
        "core/gpus/offer.py",
        "OF_A_PART if is_placed else _BOUND_BY_CLAIMS",
        "_BOUND_BY_CLAIMS",
        tests=(OFFER,),
    ),
    Mutation(
        "a claimed GPU is unhealthy until its bind was inspected",
        "core/gpus/offer.py",
        " or r.outstanding is None\n",
        " or r.outstanding is None or True\n",
        tests=(OFFER,),
    ),
    # --- a hand-over --------------------------------------------------------------------------------------------------
    Mutation(
        "a daemon that has handed over takes its sockets away at once",
        "core/claims/machine.py",
        "        over, claims = Elsewhere(), replace(claims, relays_until=at + limits.RELAY_S)\n",
        "        over = Elsewhere()\n",
        tests=(RESTART,),
    ),
    Mutation(
        "a call that is passed on is given up where the successor is not there yet",
        "actors/relay.py",
        "            if (passed_on := await theirs(claim)) is not None:\n",
        "            if passed_on := await theirs(claim) or Refused.__new__(Refused):\n",
        tests=(RELAY,),
    ),
    Mutation(
        "two daemons that have handed over ask each other",
        "kubelet/dra/successor.py",
        "p for p, at in made_at.items() if at > own_at",
        "p for p, at in made_at.items() if p != own",
        tests=(SUCCESSOR,),
    ),
)
