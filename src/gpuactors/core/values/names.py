"""The rules for names from outside that become a part of a path or of a CDI id.

A claim's UID, its name, its requests and the driver's name come from kubelet, the API server and the operator. The API
server checks them, but a path is made of them on this node, so they are checked here as well.

A file of its own: adaptors and the core check names by the same rules. `re` compiles each pattern at its first use:
most daemons use none.
"""

from __future__ import annotations

import re
from typing import Final

CONTROL_DIRECTORY: Final = "gpuactors"
"""The directory of the daemon's control socket, in kubelet's directory of device plugins (docs/dev/adr/0020)."""

_LABEL_CHARS_MAX: Final = 63
_SUBDOMAIN_CHARS_MAX: Final = 253

_LABEL: Final = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN: Final = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
_UID: Final = r"[0-9A-Za-z]([0-9A-Za-z-]*[0-9A-Za-z])?"
_DOMAIN_ID: Final = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def is_label(text: str) -> bool:
    """Return whether `text` is a DNS label, as the names of requests, devices and pod claims are (apimachinery
    validation.IsDNS1123Label)."""
    return len(text) <= _LABEL_CHARS_MAX and re.fullmatch(_LABEL, text) is not None


def is_subdomain(text: str) -> bool:
    """Return whether `text` is a DNS subdomain, as the names of claims and drivers are
    (validation.IsDNS1123Subdomain)."""
    return len(text) <= _SUBDOMAIN_CHARS_MAX and re.fullmatch(_SUBDOMAIN, text) is not None


def node_name_of(host_name: str) -> str:
    """Return the name of the Node that kubelet makes of its host's name, or of `--hostname-override`
    (component-helpers node/util, GetHostname)."""
    return host_name.strip().lower()


def is_uid(text: str) -> bool:
    """Return whether `text` can be one path component and a part of a CDI device name. The API server makes UUIDs."""
    return len(text) <= _LABEL_CHARS_MAX and re.fullmatch(_UID, text) is not None


def uid_in_cdi_id(cdi_id: str, driver: str, device: str) -> str:
    """Return the UID of the claim in the CDI id that a driver gave to a claim's device (`claims/cdi.py`, `cdi_ids`;
    NVIDIA's driver names it the same way); empty if it is another id."""
    start, end = f"k8s.{driver}/claim=", f"-{device}"
    if not (cdi_id.startswith(start) and cdi_id.endswith(end)):
        return ""
    uid = cdi_id[len(start) : -len(end)]
    return uid if is_uid(uid) else ""


def is_domain_id(text: str) -> bool:
    """Return whether `text` can be the `domainID` of a compute domain: the UUID of the ComputeDomain object. Users
    write it in both configurations, and a directory is named after it."""
    return re.fullmatch(_DOMAIN_ID, text) is not None
