"""The settings. Each is declared once, here: key, type, default and description.

Must not hold bounds of the running program: those are in `limits.py`, or in the file that uses one.
"""

# Without deferred annotations: those of `Config` are evaluated once, not compiled again for each reader.

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from gpuactors.core.values.device_spec import is_kind
from gpuactors.core.values.model import ResourceName
from gpuactors.core.values.names import is_label, is_subdomain, node_name_of
from gpuactors.core.values.naming import parse_own_name
from gpuactors.core.values.own_resources import conflict_of_rules, parse_model_rule, parse_rule
from gpuactors.core.values.selector import EXCLUDE_MARK, SELECTOR_KEYS, Selector, full_address, parse_selector
from gpuactors.core.values.vgpu import OwnVgpuType, parse_own_type
from gpuactors.limits import IMEX_CHANNELS_MAX, JOURNAL_MAX_BYTES, SOCKET_PATH_MAX_BYTES

from .declaration import LIST_SEPARATOR, Declaration, Described, declared

RESYNC_INTERVAL_MAX_S: Final = 86_400.0
"""The longest interval that an operator may set between two full scans, a day: a change whose uevent was lost (the
kernel drops them when a socket's buffer is full) must be found at some time, and a scan of 4,096 functions costs 40
ms."""

DEFAULT_SELECTORS: Final = ("vendor=10de,class=03", "vendor=10de,class=0680")
"""NVIDIA's display controllers, and its NVSwitch bridges."""

Holders: TypeAlias = Literal["passive", "proc", "open"]
Preset: TypeAlias = Literal["kubevirt", "kata"]
AllocateAs: TypeAlias = Literal["nodes", "cdi"]
WaitIn: TypeAlias = Literal["pre-start", "allocate"]
OnOff: TypeAlias = Literal["on", "off"]
Nvswitch: TypeAlias = Literal["refuse", "allow"]
Sets: TypeAlias = Literal["prefer", "require"]
ComputeDomains: TypeAlias = Literal["off", "on", "host-managed"]
LogFormat: TypeAlias = Literal["json", "console"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class TcpHttp(Struct, frozen=True):
    """One address of this machine."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EverywhereHttp(Struct, frozen=True):
    """Every address of this machine, of both families."""

    port: int

    def __str__(self) -> str:
        return f":{self.port}"


class UnixHttp(Struct, frozen=True):
    """A unix socket."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


HttpAddress: TypeAlias = TcpHttp | EverywhereHttp | UnixHttp


# --- checks that a type cannot make -----------------------------------------------------------------------


def _checked_selectors(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the selectors in their full form. If all exclude, they exclude from the default, which is included."""
    selectors = tuple(parse_selector(text) for text in texts)
    included = () if any(not selector.exclude for selector in selectors) else DEFAULT_SELECTORS
    return (*included, *map(str, selectors))


def _checked_resource_names(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in their full form."""
    named = [parse_own_name(text) for text in texts]
    for (vendor, device), resource in named:
        other_names = {other for ids, other in named if ids == (vendor, device)} - {resource}
        if other_names:
            raise ValueError(
                f"{vendor}:{device} has two names, {resource} and {min(other_names)}: leave one of them out"
            )
    return tuple(f"{vendor}:{device}={resource}" for (vendor, device), resource in dict.fromkeys(named))


def _excludes(items: Sequence[object]) -> bool:
    """Return whether all selectors exclude: an entry of `nodes` with such ones keeps what is selected without it."""
    return all(isinstance(item, str) and item.lstrip().startswith(EXCLUDE_MARK) for item in items)


def _rule_texts(item: object) -> Sequence[object]:
    """Return the rules that one item of `resource` stands for: itself, or one for each selector of a mapping."""
    if not isinstance(item, dict):
        return (item,)
    name, select = item.get("name"), item.get("select")
    selectors = select.split(LIST_SEPARATOR) if isinstance(select, str) else select
    if item.keys() != {"name", "select"} or not isinstance(name, str) or not isinstance(selectors, list):
        raise ValueError("a mapping has a name, and a list of selectors in select")
    if not selectors or not all(isinstance(selector, str) for selector in selectors):
        raise ValueError(f"{name} has no selectors")
    return [f"{name}={selector}" for selector in selectors]


_SELECTOR_BEGINS: Final = rf"\s*({'|'.join(SELECTOR_KEYS)})\s*="

_RULE_SCHEMA: Final[Mapping[str, object]] = {
    "type": "object",
    "required": ["name", "select"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "description": "The resource, DOMAIN/NAME."},
        "select": {
            "description": "The selectors of its devices.",
            "anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "string"}],
        },
    },
}


def _checked_rules(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the rules in their full form."""
    rules = tuple(dict.fromkeys(map(parse_rule, texts)))
    names: dict[Selector, str | None] = {}
    for rule in rules:
        first = names.setdefault(msgspec.structs.replace(rule, resource=None), rule.resource)
        if first != rule.resource:
            raise ValueError(f"{rule} has the name {first} already: leave one of them out")
    return tuple(map(str, rules))


def _checked_labels(texts: tuple[str, ...]) -> tuple[str, ...]:
    from .fleet import labels_of  # as in `sources.py`

    return tuple(f"{key}={value}" for key, value in labels_of(texts).items())


def _checked_vgpu_types(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in their full form."""
    named = [parse_own_type(text) for text in texts]
    for own in named:
        others = {o.name for o in named if (o.card, o.number) == (own.card, own.number)} - {own.name}
        if others:
            where = f"of {own.card} " if own.card else ""
            raise ValueError(
                f"type {own.number} {where}has two names, {own.name} and {min(others)}: leave one of them out"
            )
    return tuple(map(str, dict.fromkeys(named)))


_DRIVER_NAME_MAX_CHARS: Final = 63
"""The most characters of a DRA driver's name (k8s.io/api resource/v1, DriverNameMaxLength)."""


def _checked_node_name(text: str) -> str:
    """Return the name that kubelet gives the Node by `--hostname-override`. The host's own name may be anything, and is
    not checked."""
    name = node_name_of(text)
    if name and not is_subdomain(name):
        raise ValueError("it is a DNS name, as kubectl get nodes shows it")
    return name


def _checked_driver_name(text: str) -> str:
    if len(text) > _DRIVER_NAME_MAX_CHARS or not is_subdomain(text):
        raise ValueError("Kubernetes takes no other driver name")
    return text


def _checked_namespace(text: str) -> str:
    if not is_label(text):
        raise ValueError("Kubernetes takes no other namespace")
    return text


def _checked_clique(text: str) -> str:
    from gpuactors.core.domains.clique import is_clique  # a node without compute domains needs nothing of it

    if not is_clique(text):
        raise ValueError("NVIDIA's driver knows no other cliques")
    return text


_CDI_ID: Final = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+=[A-Za-z0-9._:-]+")


def _checked_management(text: str) -> str:
    if text not in ("auto", "none") and not _CDI_ID.fullmatch(text):
        raise ValueError("the container runtime knows devices by such ids only")
    return text


def _checked_address(text: str) -> str:
    if (address := full_address(text)) is None:
        raise ValueError(f"'{text}' is neither")
    return address


def _checked_prebound(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses in their full form."""
    return tuple(text if text == "all" else _checked_address(text) for text in texts)


def _checked_uevents(text: str) -> str:
    """Return the text if it names a source that `host/uevents.py` opens."""
    scheme, _, path = text.partition(":")
    if scheme == "unix" and path:
        _socket_path(path)
    elif text not in ("kernel", "off"):
        raise ValueError(f"{text!r} is none of these")
    return text


def _socket_path(path: str) -> Path:
    if len(os.fsencode(path)) > SOCKET_PATH_MAX_BYTES:
        raise ValueError(f"the path has {len(os.fsencode(path))} bytes")
    if "\0" in path:
        raise ValueError("the path holds a NUL character")
    return Path(path)


def _checked_http_address(text: str) -> str:
    _http_address(text)
    return text


_TCP: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]*)):([0-9]{1,5})")


def _http_address(text: str) -> HttpAddress | None:
    if text == "off":
        return None
    if text.startswith("unix:") and len(text) > len("unix:"):
        return UnixHttp(_socket_path(text.removeprefix("unix:")))
    match = _TCP.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is none of these")
    port = int(match[3])
    if not 0 < port < 65536:
        raise ValueError(f"there is no port {port}")
    host = match[1] or match[2]
    return TcpHttp(host, port) if host else EverywhereHttp(port)


# --- the settings -----------------------------------------------------------------------------------------

_A_PATH: Final = "a path, not empty and without NUL"


def _path(default: str) -> Any:
    # A factory, because msgspec cannot write a Path into a schema as a default; `schema` puts it there as
    # text.
    return msgspec.field(default_factory=lambda: Path(default))


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of gpuactors. Units are in the names (`_s`: seconds)."""

    host_root: Annotated[
        Path,
        Described(
            "Directory under which the host's /sys, /dev and /proc are mounted.",
            metavar="DIR",
            must_be=_A_PATH,
        ),
    ] = _path("/")
    kubelet_dir: Annotated[
        Path,
        Described(
            "Kubelet's root directory (its `--root-dir`), with `pod-resources/`, `plugins/` and `plugins_registry/`.",
            metavar="DIR",
            must_be=_A_PATH,
        ),
    ] = _path("/var/lib/kubelet")
    device_plugin_dir: Annotated[
        Path,
        Described(
            "Kubelet's directory of device plugins, with its ledger file. Kubelet leaves it in /var/lib/kubelet, "
            "whatever its root directory is.",
            metavar="DIR",
            must_be=_A_PATH,
            default="device-plugins in /var/lib/kubelet",  # the path itself would be broken at its hyphen
        ),
    ] = _path("/var/lib/kubelet/device-plugins")
    state_dir: Annotated[
        Path,
        Described(
            "Directory of the control socket, the journal and the state that outlives the daemon.",
            metavar="DIR",
            must_be=_A_PATH,
        ),
    ] = _path("/var/lib/gpuactors")
    pci_ids: Annotated[
        Path | None,
        Described(
            "The pci.ids file with the names of the models. The host's own file is used only if it is named here.",
            metavar="FILE",
            must_be="the path of a pci.ids file, not empty and without NUL",
            default="the shipped one",
        ),
    ] = None
    resource_name: Annotated[
        tuple[str, ...],
        Described(
            "Custom resource names per model, each `VENDOR:DEVICE=DOMAIN/NAME` with the model's PCI ids: "
            "`10de:2330=example.com/h100`. Models may share a name. The default is the model's name in pci.ids. A "
            "device that a pod has under another name stays under that name until the pod ends.",
            metavar="VENDOR:DEVICE=DOMAIN/NAME",
            must_be="PCI ids and a resource, such as 10de:2330=example.com/h100, each ids once",
            default="none",
            check=_checked_resource_names,
            is_followed=True,
            pattern="^[^=:]+:[^=:]+=[^=]",
        ),
    ] = ()
    resource: Annotated[
        tuple[str, ...],
        Described(
            "Custom resources by selectors, each `DOMAIN/NAME=SELECTOR`: "
            "`example.com/big=vendor=10de,device=2330`. It selects these devices as `select` does. Without `mdev` it "
            "names functions, with `mdev` mediated devices. Several selectors may have one name. The first that "
            "matches names a device, before `resource_name`. A file may have mappings with `name` and `select`, a "
            "list.",
            metavar="DOMAIN/NAME=SELECTOR",
            must_be="resources with selectors, such as example.com/big=vendor=10de,device=2330, each selector once "
            "and without !",
            default="none",
            check=_checked_rules,
            is_followed=True,
            texts_of=_rule_texts,
            item_schema=_RULE_SCHEMA,
            pattern=f"^[^=]+/[^=]+={_SELECTOR_BEGINS}",
        ),
    ] = ()
    vgpu_type: Annotated[
        tuple[str, ...],
        Described(
            "Names of vGPU types by number, each `[ADDRESS/]NUMBER=NAME`: `1147=NVIDIA L40S-1Q`; with the PCI address "
            "of a physical function for that card alone. They are for a card that was full before gpuactors first "
            "read its list of types: NVIDIA's driver does not name such a type. A name here comes before one of the "
            "driver.",
            metavar="[ADDRESS/]NUMBER=NAME",
            must_be="a number and a name, such as 1147=NVIDIA L40S-1Q, each number once for a card",
            default="none",
            check=_checked_vgpu_types,
            is_followed=True,
            pattern="^[^=]*[0-9] *=",
        ),
    ] = ()
    uevents: Annotated[
        str,
        Described(
            "Source of uevents: `kernel`, `off` (only the periodic scan finds changes), or `unix:PATH` (a datagram "
            "socket that is bound at PATH, for tests).",
            metavar="kernel|off|unix:PATH",
            must_be=f"kernel, off or unix:PATH, with a PATH of at most {SOCKET_PATH_MAX_BYTES} bytes",
            check=_checked_uevents,
            may_be_off=True,
        ),
        Meta(pattern="^(kernel|off|unix:.+)$"),
    ] = "kernel"
    resync_interval_s: Annotated[
        float,
        Described(
            f"Seconds between two periodic scans of the whole host; at most {RESYNC_INTERVAL_MAX_S:.0f}, a day.",
            metavar="SECONDS",
            must_be=f"a number of seconds above 0, and at most {RESYNC_INTERVAL_MAX_S:.0f} (a day)",
        ),
        Meta(gt=0, le=RESYNC_INTERVAL_MAX_S),
    ] = 300.0
    select: Annotated[
        tuple[str, ...],
        Described(
            "Selectors of the PCI functions to offer, each `KEY=VALUE,…` with the keys vendor, device, class (the "
            "start of the class code), address and `mdev` (a type of mediated devices). A function is selected if it "
            "matches one of them and none that "
            "begins with `!`. If all begin with `!`, they exclude from the default.",
            metavar="KEY=VALUE,…",
            must_be="one or more selectors KEY=VALUE,… or !KEY=VALUE,… with the keys vendor, device, class, address "
            "and mdev",
            check=_checked_selectors,
            is_followed=True,
            extends=_excludes,
            pattern=rf"^\s*!?{_SELECTOR_BEGINS}",
        ),
        Meta(min_length=1),
    ] = DEFAULT_SELECTORS
    pre_start_gate: Annotated[
        OnOff,
        Described(
            "Whether kubelet calls PreStartContainer, which waits until no other process has the container's GPUs "
            "open. Without effect with `wait_in` `allocate`."
        ),
    ] = "on"
    preset: Annotated[
        Preset,
        Described(
            "Other defaults for a runtime of virtual machines. `kata`: `allocate_as` is `cdi` and `wait_in` is "
            "`allocate`. A setting that is given by itself wins.",
        ),
    ] = "kubevirt"
    allocate_as: Annotated[
        AllocateAs,
        Described(
            "How Allocate answers. `nodes`: by device nodes and the variable that KubeVirt reads. `cdi`: by CDI names "
            "alone, which Kata resolves. gpuactors keeps their files in --cdi-dir, one for each resource.",
        ),
    ] = "nodes"
    wait_in: Annotated[
        WaitIn,
        Described(
            "Which call waits until no other process has the container's GPUs open. `allocate` is for a runtime that "
            "starts the virtual machine before PreStartContainer, as Kata. Then kubelet does not call "
            "PreStartContainer, and admits no other pod while Allocate waits.",
        ),
    ] = "pre-start"
    holders: Annotated[
        Holders,
        Described(
            "How to detect that a GPU is in use. `passive`: by `enable` and `power/runtime_status` in sysfs; opens "
            "nothing. `proc`: also by /proc/*/fd, which names the process; needs the host's PID namespace, "
            "CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE. `open`: as `passive`, and as a last resort opens the IOMMU group "
            "of an unallocated GPU.",
        ),
    ] = "passive"
    device_plugin: Annotated[
        OnOff,
        Described(
            "Whether the GPUs are offered by the device plugin API, as extended resources.",
        ),
    ] = "on"
    dra: Annotated[
        OnOff,
        Described(
            "Whether the GPUs are offered by Dynamic Resource Allocation, as claims. A GPU has one owner across both "
            "APIs.",
        ),
    ] = "off"
    driver_name: Annotated[
        str,
        Described(
            "Name of the DRA driver, as DeviceClasses select it.",
            metavar="NAME",
            must_be="a DNS subdomain of at most 63 characters, such as gpu.nvidia.com",
            check=_checked_driver_name,
        ),
    ] = "gpu.nvidia.com"
    kubeconfig: Annotated[
        Path | None,
        Described(
            "Kubeconfig file for the API server, which DRA and `--events` need.",
            metavar="FILE",
            must_be="the path of a kubeconfig file, not empty and without NUL",
            default="the pod's service account",
        ),
    ] = None
    cdi_dir: Annotated[
        Path,
        Described(
            "Directory of the CDI files that name devices to the container runtime: written for claims of gpuactors, "
            "and for `allocate_as`; read for the claims of other drivers, whose GPUs are not given away.",
            metavar="DIR",
            must_be=_A_PATH,
        ),
    ] = _path("/var/run/cdi")
    prebound: Annotated[
        tuple[str, ...],
        Described(
            "PCI addresses of GPUs that stay on their vfio driver when a claim ends, or `all`. By default, a GPU that "
            "was already on a vfio driver before gpuactors first touched it in this boot stays there.",
            metavar="ADDRESS|all",
            must_be="PCI addresses such as 0000:23:00.0 or 23:00.0, or all",
            default="none",
            check=_checked_prebound,
        ),
    ] = ()
    driver_root: Annotated[
        Path,
        Described(
            "Root of NVIDIA's driver on the host, where it runs in a container. To close a claim's GPU, gpuactors asks "
            "nvidia-persistenced at its socket in here and at the host's own.",
            metavar="DIR",
            must_be=_A_PATH,
        ),
    ] = _path("/run/nvidia/driver")
    load_modules: Annotated[
        OnOff,
        Described(
            "Whether the host's modprobe loads the vfio driver of a claim's GPU if it is not loaded. `off`: a GPU "
            "whose driver is not loaded is not offered.",
        ),
    ] = "off"
    nvswitch: Annotated[
        Nvswitch,
        Described(
            "Whether a claim may take a GPU from its host's driver while NVSwitches of the node, or bridges to "
            "them, are on a driver of the host, which removes it from that host's NVLink fabric."
        ),
    ] = "refuse"
    sets: Annotated[
        Sets,
        Described(
            "What happens to a request whose GPUs are not exactly one partition (by the operator's file of sets or "
            "the fabric manager), or which has only some of the node's NVSwitches. `prefer`: it gets them, but sets "
            "are preferred. `require`: Allocate and a claim's prepare refuse it."
        ),
    ] = "prefer"
    sets_file: Annotated[
        Path | None,
        Described(
            "JSON file with the sets of devices that one virtual machine gets together, such as the partitions of an "
            "NVLink fabric. It is read again while the daemon runs.",
            metavar="FILE",
            must_be="the path of a JSON file, not empty and without NUL",
            default="none",
        ),
    ] = None
    partition_command: Annotated[
        Path | None,
        Described(
            "Program that prints the partitions of the node's fabric manager as NVIDIA's `fmpm -l` does. It is run as "
            "`FILE query`, without a shell.",
            metavar="FILE",
            must_be="the path of a program, not empty and without NUL",
            default="none",
        ),
    ] = None
    partition_activation: Annotated[
        OnOff,
        Described(
            "Whether gpuactors activates the partition of an NVLink fabric before a virtual machine with exactly its "
            "GPUs starts, and deactivates it after the virtual machine has ended. It runs --partition-command as "
            "`FILE activate NUMBER` and `FILE deactivate NUMBER`.",
        ),
    ] = "off"
    compute_domains: Annotated[
        ComputeDomains,
        Described(
            "Whether IMEX channels of NVIDIA's compute domains are offered as claims. `on`: a pod of each domain runs "
            "the IMEX daemon. `host-managed`: the operator runs it on the host.",
        ),
    ] = "off"
    domains_driver: Annotated[
        str,
        Described(
            "Name of the DRA driver of compute domains.",
            metavar="NAME",
            must_be="a DNS subdomain of at most 63 characters, such as compute-domain.nvidia.com",
            check=_checked_driver_name,
        ),
    ] = "compute-domain.nvidia.com"
    domains_namespace: Annotated[
        str | None,
        Described(
            "Namespace of NVIDIA's own objects of compute domains: the claims of its daemon pods, and the "
            "ComputeDomainCliques.",
            metavar="NAME",
            must_be="a namespace: a DNS label",
            default="where the domain's daemon has its claim",
            check=_checked_namespace,
        ),
    ] = None
    imex_channels: Annotated[
        int,
        Meta(ge=1, le=IMEX_CHANNELS_MAX),
        Described(
            "How many IMEX channels the node offers, from channel-0 on.",
            metavar="NUMBER",
            must_be=f"a whole number from 1 to {IMEX_CHANNELS_MAX}",
        ),
    ] = 1
    imex_ctl: Annotated[
        Path,
        Described(
            "NVIDIA's control tool for the IMEX daemon that the operator runs on the host. gpuactors runs it to check "
            "that the daemon is ready.",
            metavar="FILE",
            must_be=_A_PATH,
        ),
    ] = _path("/usr/bin/nvidia-imex-ctl")
    imex_management: Annotated[
        str,
        Described(
            "CDI id of the device that gives a compute domain's daemon the host's nvidia-imex, the driver's libraries "
            "and all GPUs for management. `auto`: the one of NVIDIA's container toolkit in --cdi-dir. `none`: the "
            "daemon's image has what it needs.",
            metavar="auto|none|VENDOR/CLASS=NAME",
            must_be="auto, none, or a CDI id such as management.nvidia.com/gpu=all",
            check=_checked_management,
        ),
    ] = "auto"
    clique: Annotated[
        str | None,
        Described(
            "The node's clique of the NVLink fabric, or `none` on a node without such a fabric.",
            metavar="UUID.NUMBER|none",
            must_be="a clique: a UUID, a dot and a number; or none",
            default="that of NVML, else the Node's label nvidia.com/gpu.clique, else --imex-clique",
            check=_checked_clique,
        ),
    ] = None
    imex_clique: Annotated[
        Path,
        Described(
            "The host's file that names the node's clique of the NVLink fabric: what GPU Feature Discovery writes, or "
            "the clique alone.",
            metavar="FILE",
            must_be=_A_PATH,
            default="where GPU Feature Discovery writes it",
        ),
    ] = _path("/etc/kubernetes/node-feature-discovery/features.d/gfd")
    http_address: Annotated[
        str,
        Described(
            "Where /metrics, /livez and /readyz are served: `HOST:PORT`, `:PORT` (every address of the pod, as "
            "kubelet's probes need it), `unix:PATH`, or `off`. /debug/state is on loopback and on a unix socket only.",
            metavar="HOST:PORT|unix:PATH|off",
            must_be="HOST:PORT, [IPv6]:PORT, :PORT, off, or unix:PATH with a PATH of at most "
            f"{SOCKET_PATH_MAX_BYTES} bytes",
            check=_checked_http_address,
            may_be_off=True,
        ),
        Meta(pattern="^(off|unix:.+|.*:[0-9]{1,5})$"),
    ] = "127.0.0.1:9400"
    events: Annotated[
        OnOff,
        Described(
            "Whether Kubernetes Events are posted: on the Node for conditions that need an operator, on a Pod while "
            "its claim waits.",
        ),
    ] = "off"
    nfd_file: Annotated[
        Path | None,
        Described(
            "Feature file to write for Node Feature Discovery, which labels the node with models, drivers and IOMMU; "
            "usually `gpuactors` in /etc/kubernetes/node-feature-discovery/features.d.",
            metavar="FILE",
            must_be="the path of a file, not empty and without NUL",
            default="none",
        ),
    ] = None
    journal: Annotated[
        OnOff,
        Described(
            "Whether all events are recorded in `state_dir`, for `gpuactors replay`; the last "
            f"{JOURNAL_MAX_BYTES >> 20} MiB are kept.",
        ),
    ] = "on"
    node_name: Annotated[
        str,
        Described(
            "Name of the Node, at the API server and in the log, the journal and the output of `inspect` and "
            "`explain`. Capitals become small, as kubelet makes them.",
            metavar="NAME",
            must_be="a node's name of at most 253 letters, digits, `-` and `.`",
            default="the host name",
            check=_checked_node_name,
            # What manifests commonly call the node's name where the downward API gives it (`spec.nodeName`).
            fallback_variable="NODE_NAME",
        ),
    ] = ""
    node_labels: Annotated[
        tuple[str, ...],
        Described(
            "Labels of the Node, each `KEY=VALUE`, by which entries of `nodes` in the configuration file match it. "
            "Without them gpuactors reads the Node from the API server if an entry depends on its labels.",
            metavar="KEY=VALUE",
            must_be="labels KEY=VALUE of a Node, each key with one value",
            default="those of the Node",
            check=_checked_labels,
        ),
    ] = ()
    reload: Annotated[
        OnOff,
        Described(
            "Whether the configuration file is read again when it changes. A change of `select`, `resource`, "
            "`resource_name` and `vgpu_type` alone is used without a restart. A wrong file, or one with any other "
            "change, is not used.",
        ),
    ] = "off"
    log_format: Annotated[LogFormat, Described("Format of the log lines.")] = "json"
    log_level: Annotated[LogLevel, Described("Lowest level that is logged.")] = "info"

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """`select`, `resource` and `resource_name`, parsed: a rule of `resource` names a device before one of
        `resource_name`. Raises ValueError only for a Config that was not made by `load`."""
        return (
            *map(parse_selector, self.select),
            *map(parse_rule, self.resource),
            *map(parse_model_rule, self.resource_name),
        )

    @property
    def own_names(self) -> Mapping[tuple[str, str], ResourceName]:
        """`resource_name`, parsed: by vendor and device. Raises ValueError only for a Config that was not made by
        `load`."""
        return dict(map(parse_own_name, self.resource_name))

    @property
    def vgpu_types(self) -> tuple[OwnVgpuType, ...]:
        """`vgpu_type`, parsed. Raises ValueError only for a Config that was not made by `load`."""
        return tuple(map(parse_own_type, self.vgpu_type))

    @property
    def http(self) -> HttpAddress | None:
        """`http_address`, parsed; None: off. Raises ValueError only for a Config that was not made by `load`."""
        return _http_address(self.http_address)


PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "kubevirt": {},
    "kata": {"allocate_as": "cdi", "wait_in": "allocate"},
}
"""The defaults of each preset that are not those of the settings."""


def conflict_of(config: Config) -> str | None:
    """Return which settings, each valid, cannot be used together, as a sentence; None if all can."""
    named = [(name, Selector(vendor=v, device=d)) for (v, d), name in config.own_names.items()]
    rules = [(ResourceName(rule.resource or ""), rule) for rule in map(parse_rule, config.resource)]
    conflict = conflict_of_rules((*rules, *named)) if rules or len(named) > 1 else None
    if conflict is None and config.partition_activation == "on" and config.partition_command is None:
        conflict = (
            "partition_activation: on needs partition_command, the program that activates a partition; name it, or "
            "switch the activation off"
        )
    if conflict is not None or config.allocate_as != "cdi":
        return conflict
    names = [(f"resource has {rule}", name) for name, rule in rules]
    names += [(f"resource_name has {v}:{d}={name}", name) for (v, d), name in config.own_names.items()]
    invalid = next((setting for setting, name in names if not is_kind(name)), None)
    if invalid is None:
        return None
    return f"{invalid}, which with allocate_as cdi must be a CDI kind: its domain and its name each begin with a letter"


DECLARATIONS: Final[Mapping[str, Declaration]] = declared(Config)
"""Every setting by its key, in the order in which they are shown."""

KEYS: Final[tuple[str, ...]] = tuple(DECLARATIONS)
