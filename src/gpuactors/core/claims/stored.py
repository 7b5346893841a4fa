"""A claim's entry as JSON, in the checkpoint, and back.

    "<uid>": {"namespace": "default", "name": "one", "state": "Prepared",
     "generation": 1, "podClaimName": null,
     "results": [{"request": …, "pool": …, "device": "gpu-0000-23-00-0", "shareId": null, "adminAccess": false}],
     "configs": [{"fromClass": true, "requests": [], "parameters": {…}}],
     "gpus": [{"address": "0000:23:00.0", "stays": "", "functions": [{"address": …, "driver": …, "vfio": false, …}]}],
     "bound": [{"address": …, "driver": "vfio-pci", "iommuGroup": 51, "cdev": null, "vfio": true, …}],
     "given": [{"requests": ["gpu"], "pool": …, "device": …, "cdiIds": […], "shareId": null}], "unplaced": [],
     "domain": {"uid": …, "name": …, "namespace": …, "devices": ["channel-0"], "channelMajor": 501, "cliqueId": …, …}}

A field that is not known, a newer daemon's, is ignored here; `acts/checkpoint.py` keeps those of the file. Every
content of a file is decoded to a value that this daemon can use, or raises `MalformedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from gpuactors.core.claims.checkpoint import Checkpoint, MalformedError
from gpuactors.core.state.claims import ClaimedGpu, OwedReturn, StoredEntry
from gpuactors.core.values.claim import (
    AllocatedDevice,
    BoundFunction,
    Claim,
    ClaimedModels,
    ClaimName,
    ClaimUid,
    Json,
    OpaqueConfig,
    OriginalDriver,
    PreparedDevice,
)
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import CHANNELS_MAX, ClaimedDomain, DomainUid, ImexFacts, device_of
from gpuactors.core.values.model import PciAddress, is_pci_address
from gpuactors.core.values.names import is_domain_id

EARLIER_CLAIMS_MAX: Final = 1024
"""Claims of earlier boots of which the model of each device is remembered: four of a node with 256 GPUs."""

T = TypeVar("T")

_STATES: Final = (
    ClaimState.RESERVED,
    ClaimState.PREPARED,
    ClaimState.TAKEN_OVER,
    ClaimState.RELEASING,
)


def encoded_entry(entry: StoredEntry) -> Mapping[str, Json]:
    """The entry as it is on disk."""
    found: dict[str, Json] = {
        "namespace": entry.name.namespace,
        "name": entry.name.name,
        "state": str(entry.state),
        "gpus": tuple(map(_gpu, entry.gpus)),
        "bound": tuple(
            {
                "address": b.address,
                "driver": b.driver,
                "iommuGroup": b.iommu_group,
                "cdev": b.cdev,
                "vfio": b.vfio,
                "presence": b.presence,
                "persistence": b.persistence,
            }
            for b in entry.bound.values()
        ),
    }
    if entry.domain is not None:
        found["domain"] = _domain(entry.domain)
    if entry.state is ClaimState.TAKEN_OVER:
        found |= {"given": tuple(map(_given, entry.given)), "unplaced": entry.unplaced}
    return found if entry.claim is None else {**found, **_claim(entry.claim)}


def decoded_entry(uid: ClaimUid, content: Mapping[str, Json]) -> StoredEntry:
    """The entry of a claim. Raises `MalformedError`."""
    name = ClaimName(_text(content, "namespace"), _text(content, "name"), uid)
    state = _text(content, "state")
    if state not in _STATES:
        raise MalformedError(f"the claim {name} has the state {state!r}")
    bound = _each(content, "bound", _as_bound)
    return StoredEntry(
        name,
        ClaimState(state),
        _as_claim(name, content) if "results" in content else None,
        _each(content, "gpus", _as_gpu),
        {b.address: b for b in bound},
        _as_domain(content.get("domain")),
        given=_each(content, "given", _as_given) if "given" in content else (),
        unplaced=_texts(content, "unplaced") if "unplaced" in content else (),
    )


def models_of(checkpoint: Checkpoint) -> ClaimedModels:
    """The model of each device of the claims that a checkpoint of an earlier boot has: kubelet prepares such a claim
    again, and another device may be in the slot by then. The newest, if there are more than EARLIER_CLAIMS_MAX. An
    entry that cannot be decoded has none."""
    found = dict(checkpoint.earlier_models)
    for uid, content in checkpoint.claims.items():
        models = _models_of(uid, content, checkpoint.original_drivers)
        found.pop(uid, None)
        if models:
            found[uid] = models
    return dict([*found.items()][-EARLIER_CLAIMS_MAX:])


def _models_of(
    uid: ClaimUid, content: Mapping[str, Json], known: Mapping[PciAddress, OriginalDriver]
) -> Mapping[PciAddress, str]:
    try:
        gpus = decoded_entry(uid, content).gpus
    except MalformedError:
        return {}
    firsts = {**known} | {f.address: f for gpu in gpus for f in gpu.functions if f.ids}
    return {
        gpu.address: first.ids for gpu in gpus if (first := firsts.get(gpu.address)) is not None and first.ids
    }


def encoded_return(owed: OwedReturn) -> Mapping[str, Json]:
    """A return that is owed, as it is on disk."""
    name = {"namespace": owed.claim.namespace, "name": owed.claim.name, "uid": owed.claim.uid}
    return {**name, **_gpu(owed.gpu)}


def decoded_return(content: Mapping[str, Json]) -> OwedReturn:
    """Raises `MalformedError`."""
    name = ClaimName(_text(content, "namespace"), _text(content, "name"), ClaimUid(_text(content, "uid")))
    return OwedReturn(_as_gpu(content), name)


# --- to JSON ----------------------------------------------------------------------------------------------


def _gpu(gpu: ClaimedGpu) -> Mapping[str, Json]:
    return {"address": gpu.address, "stays": gpu.keep_on_vfio, "functions": tuple(map(_first, gpu.functions))}


def _first(first: OriginalDriver) -> Json:
    return {
        "address": first.address,
        "driver": first.driver,
        "vfio": first.vfio,
        "presence": first.presence,
        "wasBound": first.was_bound,
        "ids": first.ids,
        "persistence": first.persistence,
    }


def _given(device: PreparedDevice) -> Json:
    return {
        "requests": device.requests,
        "pool": device.pool,
        "device": device.device,
        "cdiIds": device.cdi_ids,
        "shareId": device.share_id,
    }


def _domain(own: ClaimedDomain) -> Mapping[str, Json]:
    return {
        "uid": own.uid,
        "name": own.name,
        "namespace": own.namespace,
        "devices": tuple(map(str, own.devices)),
        "imex": _imex(own.imex) if own.imex is not None else None,
        "every": own.every,
    }


def _imex(facts: ImexFacts) -> Mapping[str, Json]:
    return {
        "channelMajor": facts.channel_major,
        "capsMajor": facts.caps_major,
        "mgmtMinor": facts.mgmt_minor,
        "cliqueId": facts.clique_id,
        "channels": facts.channels,
        "management": facts.management,
    }


def _claim(claim: Claim) -> Mapping[str, Json]:
    return {
        "podClaimName": claim.pod_claim_name,
        "generation": claim.generation,
        "results": tuple(
            {
                "request": r.request,
                "pool": r.pool,
                "device": r.device,
                "shareId": r.share_id,
                "adminAccess": r.admin_access,
            }
            for r in claim.results or ()
        ),
        "configs": tuple(
            {"fromClass": c.from_class, "requests": c.requests, "parameters": c.parameters}
            for c in claim.configs
        ),
    }


# --- and back -----------------------------------------------------------------------------------------------


def _as_claim(name: ClaimName, content: Mapping[str, Json]) -> Claim:
    return Claim(
        name,
        _text_or_none(content, "podClaimName"),
        _number(content, "generation"),
        _each(content, "results", _as_result),
        _each(content, "configs", _as_config),
    )


def _as_domain(content: Json) -> ClaimedDomain | None:
    if content is None:
        return None
    if not isinstance(content, Mapping):
        raise MalformedError("domain is no object")
    uid, names = _text(content, "uid"), content.get("devices")
    if not is_domain_id(uid):
        raise MalformedError(f"the domain's UID is {uid!r}, which is no UUID")
    devices = (
        tuple(device_of(n) if isinstance(n, str) else None for n in names or ())
        if isinstance(names, tuple)
        else ()
    )
    if not devices or None in devices:
        raise MalformedError("the devices of a domain are no names of devices")
    return ClaimedDomain(
        DomainUid(uid),
        _text(content, "name"),
        _text(content, "namespace"),
        tuple(device for device in devices if device is not None),
        _as_imex(content.get("imex")),
        every="every" in content and _flag(content, "every"),
    )


def _as_imex(content: Json) -> ImexFacts | None:
    if content is None:
        return None
    if not isinstance(content, Mapping):
        raise MalformedError("imex is no object")
    return ImexFacts(
        channel_major=_number_or_none(content, "channelMajor"),
        caps_major=_number_or_none(content, "capsMajor"),
        mgmt_minor=_number_or_none(content, "mgmtMinor"),
        clique_id=_text(content, "cliqueId"),
        # An older daemon has written neither.
        channels=_number(content, "channels") if "channels" in content else CHANNELS_MAX,
        management=_text(content, "management") if "management" in content else "",
    )


def _as_result(content: Mapping[str, Json]) -> AllocatedDevice:
    return AllocatedDevice(
        _text(content, "request"),
        _text(content, "pool"),
        _text(content, "device"),
        _text_or_none(content, "shareId"),
        _flag(content, "adminAccess"),
    )


def _as_config(content: Mapping[str, Json]) -> OpaqueConfig:
    return OpaqueConfig(_flag(content, "fromClass"), _texts(content, "requests"), content.get("parameters"))


def _as_given(content: Mapping[str, Json]) -> PreparedDevice:
    return PreparedDevice(
        _texts(content, "requests"),
        _text(content, "pool"),
        _text(content, "device"),
        _texts(content, "cdiIds"),
        _text_or_none(content, "shareId"),
    )


def _as_gpu(content: Mapping[str, Json]) -> ClaimedGpu:
    return ClaimedGpu(_address(content), _each(content, "functions", _as_first), _text(content, "stays"))


def _as_first(content: Mapping[str, Json]) -> OriginalDriver:
    return OriginalDriver(
        _address(content),
        _text_or_none(content, "driver"),
        vfio=_flag(content, "vfio"),
        presence=_presence(content),
        was_bound=content.get("wasBound") is True,
        persistence=content.get("persistence") is True,
        ids=_text(content, "ids") if "ids" in content else "",
    )


def _as_bound(content: Mapping[str, Json]) -> BoundFunction:
    group = None if content.get("iommuGroup") is None else _number(content, "iommuGroup")
    return BoundFunction(
        _address(content),
        _text_or_none(content, "driver"),
        group,
        _text_or_none(content, "cdev"),
        vfio=_flag(content, "vfio"),
        presence=_presence(content),
        persistence=content.get("persistence") is True,
    )


def _presence(content: Mapping[str, Json]) -> int:
    """0 of an older daemon, which noted none."""
    return _number_or_none(content, "presence") or 0


def _each(content: Mapping[str, Json], name: str, read: Callable[[Mapping[str, Json]], T]) -> tuple[T, ...]:
    items = content.get(name)
    if not isinstance(items, tuple):
        raise MalformedError(f"{name} is no list")
    return tuple(map(read, _objects(name, items)))


def _objects(name: str, items: Iterable[Json]) -> Iterable[Mapping[str, Json]]:
    for item in items:
        if not isinstance(item, Mapping):
            raise MalformedError(f"{name} has something that is no object")
        yield item


def _address(content: Mapping[str, Json]) -> PciAddress:
    text = _text(content, "address")
    if not is_pci_address(text):
        raise MalformedError(f"{text!r} is no PCI address")
    return PciAddress(text)


def _number_or_none(content: Mapping[str, Json], name: str) -> int | None:
    return None if content.get(name) is None else _number(content, name)


def _text(content: Mapping[str, Json], name: str) -> str:
    value = content.get(name)
    if not isinstance(value, str):
        raise MalformedError(f"{name} is no text")
    return value


def _texts(content: Mapping[str, Json], name: str) -> tuple[str, ...]:
    values = content.get(name)
    if not isinstance(values, tuple) or not all(isinstance(value, str) for value in values):
        raise MalformedError(f"{name} are no texts")
    return tuple(value for value in values if isinstance(value, str))


def _text_or_none(content: Mapping[str, Json], name: str) -> str | None:
    return None if content.get(name) is None else _text(content, name)


def _flag(content: Mapping[str, Json], name: str) -> bool:
    value = content.get(name)
    if not isinstance(value, bool):
        raise MalformedError(f"{name} is neither true nor false")
    return value


def _number(content: Mapping[str, Json], name: str) -> int:
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedError(f"{name} is no number")
    return value
