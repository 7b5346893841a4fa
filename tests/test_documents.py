"""The documents as a whole: links and anchors lead somewhere, commands can be parsed, and what is named exists."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest

from gpuactors.cli.commands import cli
from gpuactors.cli.doctor.finding import Check
from gpuactors.config import DECLARATIONS
from gpuactors.core.reports.kube_events import CONTESTED
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim_states import ClaimState
from gpuactors_simulation.run import list_scenarios
from tests.node import pages
from tests.observe.documented_events import EVENTS
from tests.support.markdown import anchors, blocks, links, spans
from tests.support.said import is_said
from tests.test_tree import ROOT, texts

DOCUMENTS: Final = {name: text for name, text in texts() if name.endswith(".md")}

FOR_OPERATORS: Final = re.compile(r"README\.md|deploy/README\.md|docs/[\w-]+\.md")

OPERATORS: Final = [name for name in DOCUMENTS if FOR_OPERATORS.fullmatch(name)]
"""Decisions and the changelog tell of what was; the architecture, the glossary and the figures have names of their
own."""


# --- links --------------------------------------------------------------------------------------------------


def lost(name: str, text: str) -> Iterator[str]:
    """The links of a document that lead nowhere."""
    for target in links(text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        to = (ROOT / name).parent / path if path else ROOT / name
        if not to.exists() or (anchor and anchor not in anchors(to.read_text(encoding="utf-8"))):
            yield target


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    assert not list(lost(name, DOCUMENTS[name]))


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "[a](dra.md) [b](none.md) [c](dra.md#install-claims) [d](dra.md#none) [e](#none) [f](https://kubernetes.io/x)"
    assert list(lost("docs/x.md", text)) == ["none.md", "dra.md#none", "#none"]


@pytest.mark.parametrize("directory", ["docs", "docs/dev"])
def test_the_first_page_leads_to_every_page(directory: str) -> None:
    """And that of docs/ to that of docs/dev/."""
    first = f"{directory}/README.md"
    reached = {(ROOT / directory / t.partition("#")[0]).resolve() for t in links(DOCUMENTS[first])}
    pages = {ROOT / name for name in DOCUMENTS if re.fullmatch(rf"{directory}/[\w-]+\.md", name)}
    assert pages - reached == {ROOT / first}
    assert directory != "docs" or ROOT / "docs/dev/README.md" in reached


def test_the_page_of_the_folder_names_each_overlay() -> None:
    overlays = {path.name for path in (ROOT / "deploy/overlays").iterdir()}
    named = {span.removeprefix("overlays/").strip("/") for span in spans(DOCUMENTS["deploy/README.md"])}
    assert overlays <= named


def test_the_architecture_names_each_file_of_the_core() -> None:
    named = {*re.findall(r"`([\w/]+\.py)`", DOCUMENTS["docs/dev/architecture.md"])}
    core = ROOT / "src/gpuactors/core"
    files = {f"{path.relative_to(core)}" for path in core.rglob("*.py") if path.name != "__init__.py"}
    assert {name for name in files - named if not name.startswith("assessment/")} == set()
    assert {name for name in named - files if not [*(ROOT / "src/gpuactors").rglob(Path(name).name)]} == set()


# --- commands -----------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[str]:
    """The command lines of gpuactors in a document's blocks, without what follows them."""
    for line in blocks(text):
        found = re.fullmatch(r"(?:kubectl .*? -- )?gpuactors (.*?)(?: +#.*)?(?: [|>] .*)?", line)
        if found is not None and found[1].split()[0] in cli.commands:
            yield found[1]


def parse(line: str) -> None:
    """Parses a command line as the program does, and runs nothing. Raises `click.UsageError`."""
    with cli.make_context("gpuactors", [], resilient_parsing=True) as context:
        group: click.Group = cli
        words = shlex.split(line)
        while True:
            name, command, words = group.resolve_command(context, words)
            if command is None:
                raise click.UsageError(f"there is no command {name}")
            if not isinstance(command, click.Group):
                break
            group = command
        try:
            command.make_context(name, words, parent=context)
        except click.BadParameter as error:
            if "does not exist" not in error.message:  # a file that the reader has
                raise


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, text in DOCUMENTS.items() for line in commands(text)]
)
def test_a_command_line_can_be_parsed(name: str, line: str) -> None:
    parse(line)


@pytest.mark.parametrize("line", ["doctor --perhaps", "explain", "config shout", "inspect -o xml", "runs"])
def test_a_command_line_that_is_wrong_is_found(line: str) -> None:
    with pytest.raises(click.UsageError):
        parse(line)


def test_command_lines_are_found() -> None:
    text = "    gpuactors doctor -o json | jq .   # all\n    kubectl exec POD -- gpuactors inspect   # it\n"
    text += "    gpuactors is good\n"
    assert list(commands(text)) == ["doctor -o json", "inspect"]


def test_each_command_of_an_operators_pages_is_played_or_tried_elsewhere() -> None:
    """On the real node, by tests/node/test_pages.py, with NODE and POD put in."""
    sections = {
        (page, head): pages.commands(pages.section(DOCUMENTS[page], head)) for page, head in pages.PLAYED
    }
    assert all({*lines} - {*pages.ELSEWHERE} for lines in sections.values()), sections
    lines = {line for lines in sections.values() for line in lines}
    assert {*pages.ELSEWHERE} <= lines
    open_ends = {word for line in lines - {*pages.ELSEWHERE} for word in re.findall(r"\b[A-Z]{3,}\b", line)}
    assert open_ends == {"NODE", "POD"}


# --- names --------------------------------------------------------------------------------------------------


@functools.cache
def flags() -> frozenset[str]:
    """Every flag of every command."""
    commands = [
        *cli.commands.values(),
        *(c for g in cli.commands.values() if isinstance(g, click.Group) for c in g.commands.values()),
    ]
    named = {flag for c in commands for p in c.params for flag in (*p.opts, *p.secondary_opts)}
    return frozenset({*named, "--help", "--version"})


FLAGS_OF_OTHERS: Final = frozenset({"--validate", "--root-dir", "--context", "-l"})
"""Of kubectl, kubelet and kubectl-gpuactors."""

VARIABLES: Final = {"GPUACTORS_CONFIG", *(setting.variable for setting in DECLARATIONS.values())}

METRICS: Final = frozenset(re.findall(r"^\| `(gpuactors_\w+)`", DOCUMENTS["docs/reference.md"], re.MULTILINE))
"""docs/reference.md#metrics is what the code declares: test_tree.py."""

PACKAGES: Final = frozenset(path.name for path in (ROOT / "src").iterdir())

NO_EVENTS: Final = re.compile(r".*\.(?:json|sock|py|lock|gpus|ids|cfg)")
"""Names of files, and `devices.gpus` of a virtual machine."""

NOUNS: Final = {event.partition(".")[0] for event in EVENTS}

WORDS_OF_OTHERS: Final = frozenset(
    {
        "CreateContainerConfigError", "DeadlineExceeded", "FailedPrepareDynamicResources", "IfPossible",
        "PreStartContainer", "UnexpectedAdmissionError", "RuntimeDefault",
    }
    | {"ComputeDomainChannelConfig", "ComputeDomainDaemonConfig", "DeviceFileMinor", "LegacyOnly", "PreferIommuFD"}
    | {"ImexChannelCount"}
    | {"DeviceStatus", "NotReady", "CheckpointRead", "PodResources"}
    | {"CrashLoopBackOff", "ErrImagePull", "FailedMount", "ImagePullBackOff"}
    | {"GetPreferredAllocation", "NodePrepareResources", "NodeUnprepareResources"}
)  # fmt: skip
"""Kubernetes' and NVIDIA's, and of our own those of the architecture and the states of a domain."""

NAMES_OF_OTHERS: Final = frozenset(
    {
        # the kernel's files, modules and parameters
        "driver_override", "drivers_probe", "enable_unsafe_noiommu_mode", "gpu_devices", "new_id",
        "nvgrace_gpu_vfio_pci", "pcie_acs_override", "snd_hda_intel", "sriov_numvfs", "vfio_pci", "xhci_pci",
        # those of vGPUs
        "gpu_instance_id", "mdev_type", "placement_id",
        # kubelet's directory and file, a flag of a process, SELinux' types
        "kubelet_internal_checkpoint", "plugins_registry", "no_new_privs",
        "container_device_plugin_t", "container_file_t", "spc_t", "var_lib_t",
        # settings of Kata, and a field of PodResources
        "cold_plug_vfio", "pod_resource_api_sock", "pod_resource_device_sources", "dynamic_resources",
        # the annotation by which Alertmanager and its readers find what to do
        "runbook_url",
    }
)  # fmt: skip

ALERTS: Final = frozenset(
    re.findall(r"^\| <a [^>]*></a>\[`(\w+)`", DOCUMENTS["docs/troubleshoot.md"], re.MULTILINE)
)

OF_METRICS: Final = {*spans(DOCUMENTS["docs/reference.md"])}
"""With their labels."""

OF_EVENTS: Final = {name for event in EVENTS.values() for name in event.fields}

NAMES: Final = NAMES_OF_OTHERS | OF_METRICS | OF_EVENTS | {*DECLARATIONS}

CAUSES_AND_STATES: Final = {*map(str, Cause), *map(str, Check), *map(str, ClaimState), CONTESTED}


def unknown(text: str) -> Iterator[str]:
    """What a document names in backticks as a flag, variable, setting, metric, log event, cause, check or state, and is
    none."""
    for span in spans(text):
        words = span.split()
        if span.startswith(("-", "gpuactors ")):
            named = re.findall(r"(?<![\w-])--?[a-z][\w-]*", span)
            yield from (flag for flag in named if flag not in flags() | FLAGS_OF_OTHERS)
        if words[0] == "gpuactors" and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]):
            yield from (words[1:2] if words[1] not in cli.commands else [])
        yield from (v for v in re.findall(r"GPUACTORS_[A-Z_]*[A-Z]", span) if v not in VARIABLES)
        yield from (m for m in re.findall(r"gpuactors_\w+", span) if m not in METRICS | PACKAGES)
        if setting := re.fullmatch(r"([a-z]+(?:_[a-z]+)+)(?:: [\w-]+)?|([a-z]+): [\w-]+", span):
            name = setting[1] or setting[2]
            yield from () if name in NAMES or name.startswith(("scenario_", "test_")) else (name,)
        if re.fullmatch(r"[a-z_]+\.[a-z_]+", span) and span.partition(".")[0] in NOUNS:
            yield from () if span in EVENTS or NO_EVENTS.fullmatch(span) else (span,)
        if re.fullmatch(r"(?:[A-Z][a-z0-9]+){2,}[A-Z]*", span):
            yield from () if span in CAUSES_AND_STATES | WORDS_OF_OTHERS | ALERTS else (span,)


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_named_exists(name: str) -> None:
    assert not sorted({*unknown(DOCUMENTS[name])})


def unshown(text: str) -> Iterator[str]:
    """The tests and scenarios that are named in a link to their file, and are not there; "the same" is that of the
    first cell of the row."""
    for row in text.splitlines():
        first = ""
        for name, path in re.findall(r"\[`?(test_\w+|scenario_\w+|the same)`?\]\((?:\.\./)+([^)]+)\)", row):
            first = name if name != "the same" else first
            file = ROOT / path
            is_scenario = first.startswith("scenario_") and file.stem == first
            if not is_scenario and not re.search(rf"^(async )?def {first}\(", file.read_text(), re.MULTILINE):
                yield f"{path}: {first}"


def test_the_tests_that_a_document_names_are_there() -> None:
    assert not [fault for text in DOCUMENTS.values() for fault in unshown(text)]
    assert len(re.findall(r"\]\(\.\./\.\./tests/", DOCUMENTS["docs/dev/kinds.md"])) > 30
    wrong = "| [test_none](../tests/test_tree.py) | [scenario_none](../tests/vm/guest/scenario_claims.py) |"
    assert [*unshown(wrong)] == [
        "tests/test_tree.py: test_none",
        "tests/vm/guest/scenario_claims.py: scenario_none",
    ]


def test_a_scenario_that_is_named_is_one() -> None:
    named = {s for name in OPERATORS for s in re.findall(r"--scenario ([a-z-]+)", DOCUMENTS[name])}
    assert len(named) > 3
    assert named <= {name for name, _ in list_scenarios()}


def test_what_does_not_exist_is_found() -> None:
    wrong = [
        "host_roots",
        "drb: on",
        "--sellect",
        "gpuactors doctor --pro",
        "gpuactors explode",
        "GPUACTORS_DRAA",
    ]
    wrong += ["gpuactors_device", "device.added", "HeldByOthers"]
    right = [
        "host_root",
        "dra: on",
        "--select",
        "gpuactors doctor --pre",
        "GPUACTORS_DRA",
        "gpuactors_devices",
    ]
    right += ["device.changed", "HeldByOther"]
    found = [*dict.fromkeys(unknown(" ".join(f"`{name}`" for name in (*wrong, *right))))]
    assert found == [re.sub(r"gpuactors (doctor )?|: on", "", name) for name in wrong]


# --- the words of the symptoms ------------------------------------------------------------------------------

SAID_BY_OTHERS: Final = frozenset(
    {
        # KubeVirt: pkg/virt-api/webhooks, pkg/virt-launcher/virtwrap/device/hostdevice
        "GPU nvidia.com/… is not permitted in permittedHostDevices configuration",
        "GPU feature gate is not enabled",
        "the number of GPU/s do not match the number of devices",
        "PCI_RESOURCE_NVIDIA_COM_… not set for resource",
        # the scheduler
        "0/N nodes are available: N Insufficient nvidia.com/…",
        "cannot allocate all claims",
        # kubelet: pkg/kubelet/cm/devicemanager, and gRPC
        "Allocate failed due to rpc error: … desc = …, which is unexpected",
        "requested number of devices unavailable for nvidia.com/…. Requested: 1, Available: 0",
        "no healthy devices present",
        "previously allocated devices are no longer healthy",
        "the client connection is closing",
        # QEMU: hw/vfio
        "Could not open '/dev/vfio/51': Device or resource busy",
        "group N is not viable",
        "Please ensure all devices within the iommu_group are bound to their vfio bus driver",
        "/dev/vfio/N: No such file or directory",
        "failed to setup container for group N: … Invalid argument",
        "cannot set up guest memory",
        "VFIO_MAP_DMA failed: Cannot allocate memory",
        # the kernel: drivers/iommu/iommu.c
        "Firmware has requested this device have a 1:1 IOMMU mapping",
    }
)
"""Sentences of other programs, as they were seen or stand in their source."""


def symptoms() -> list[str]:
    """What the page quotes of what somebody sees: sentences, and not names."""
    rows = [
        line.split(" | ")[0]
        for line in DOCUMENTS["docs/troubleshoot.md"].partition("\n## gpuactors doctor\n")[0].splitlines()
        if line.startswith("| ")
    ]
    quotes = [quoted for row in rows for quoted in spans(row)]
    return [quoted for quoted in quotes if " " in quoted and not re.match(r"\w+[:=] ?\w+$", quoted)]


@pytest.mark.parametrize("quoted", symptoms())
def test_a_symptom_is_in_somebodys_words(quoted: str) -> None:
    assert quoted in SAID_BY_OTHERS or is_said(quoted)


def test_no_word_of_others_is_kept_that_no_symptom_has() -> None:
    assert set(symptoms()) >= SAID_BY_OTHERS
