"""Which GPU is pre-bound: the original driver of this boot by PCI address, the operator's list, the kernel's words."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors.core.values.claim import OriginalDriver
from gpuactors.core.values.model import PciAddress, PciFunction
from gpuactors.core.values.prebound import KernelId, OperatorsList, PreBound, Rule, decide, kernel_ids, noted

A, B = PciAddress("0000:23:00.0"), PciAddress("0000:24:00.0")
NOBODY = OperatorsList()


MODEL = "10de:2330"


def function(address: PciAddress, driver: str | None, **other: str) -> PciFunction:
    vfio = driver is not None and "vfio" in driver
    made = PciFunction(address, "10de", "2330", "030200", driver, vfio, 51, 0, "pci0000:20", (), None, None)
    return replace(made, **other)


def by_first(driver: str | None, address: PciAddress = A) -> PreBound:
    known = noted({}, [function(address, driver)])
    return decide(address, known[address], operator=NOBODY)


def test_of_two_identical_gpus_one_is_prebound_and_the_other_is_not() -> None:
    known = noted({}, [function(A, "vfio-pci"), function(B, "nvidia")])
    hints = kernel_ids("vfio-pci.ids=10de:2330")
    found = {a: decide(a, known[a], operator=NOBODY, hints=hints, function=function(a, "x")) for a in known}
    assert [found[A].is_prebound, found[B].is_prebound] == [True, False]
    assert "the kernel command line names 10de:2330 as well" in found[A].sentence
    assert found[B].sentence == "it was found on nvidia"


def test_a_retry_after_our_own_bind_does_not_change_the_original_driver() -> None:
    known = noted({}, [function(A, "nvidia")])
    bound = noted(known, [function(A, "vfio-pci")], acted={A})
    assert bound is known
    assert not decide(A, bound[A], operator=NOBODY).is_prebound


def test_a_gpu_that_had_no_driver_when_our_act_began_is_given_back_without_one() -> None:
    known = noted({}, [function(A, None)])
    assert noted(known, [function(A, "vfio-pci")], acted={A})[A] == OriginalDriver(A, None, ids=MODEL)
    assert by_first(None).sentence == "it was found without a driver"


def test_a_gpu_that_a_boot_script_binds_before_any_act_of_ours_is_prebound() -> None:
    for first in (None, "nvidia"):
        known = noted({}, [function(A, first)])
        later = noted(known, [function(A, "vfio-pci")])
        assert later[A] == OriginalDriver(A, "vfio-pci", vfio=True, ids=MODEL)


def test_a_gpu_that_gets_its_host_driver_late_had_that_one_first() -> None:
    known = noted({}, [function(A, None)])
    assert noted(known, [function(A, "nvidia")])[A].driver == "nvidia"


def test_a_prebound_gpu_that_the_operator_binds_to_the_host_driver_is_returned_to_that_one() -> None:
    known = noted({}, [function(A, "vfio-pci")])
    later = noted(known, [function(A, "nvidia")])
    assert not decide(A, later[A], operator=NOBODY).is_prebound


def test_a_function_between_two_drivers_is_found_on_the_one_before() -> None:
    for driver in ("nvidia", "vfio-pci"):
        known = noted({}, [function(A, driver)])
        assert noted(known, [function(A, None)]) is known


def test_a_function_that_was_plugged_in_anew_is_found_anew() -> None:
    known = noted({}, [replace(function(A, "nvidia"), presence=7)])
    again = [replace(function(A, "vfio-pci"), presence=9)]
    assert noted(known, again, acted={A})[A] == OriginalDriver(
        A, "vfio-pci", vfio=True, presence=9, ids=MODEL
    )
    assert noted(known, [replace(function(A, "vfio-pci"), presence=7)], acted={A}) is known


def test_a_presence_that_an_older_daemon_has_not_noted_is_added() -> None:
    known = {A: OriginalDriver(A, "nvidia")}
    later = noted(known, [replace(function(A, "vfio-pci"), presence=7)], acted={A})
    assert later[A] == OriginalDriver(A, "nvidia", presence=7, ids=MODEL)


def test_a_variant_driver_counts_as_vfio() -> None:
    assert by_first("nvgrace_gpu_vfio_pci").is_prebound


def test_with_the_checkpoint_lost_a_gpu_on_vfio_counts_as_prebound() -> None:
    # The new daemon notes what it sees; that we bound it ourselves nobody knows any more.
    assert by_first("vfio-pci").is_prebound
    assert decide(A, None, operator=NOBODY) == PreBound(
        True, Rule.UNKNOWN, "its original driver is unknown, so it stays on its present one"
    )


def test_the_operators_list_overrides_and_is_named() -> None:
    first = OriginalDriver(A, "nvidia")
    named = decide(A, first, operator=OperatorsList(frozenset({A})))
    assert named == PreBound(True, Rule.OPERATOR, "--prebound 0000:23:00.0 says so")
    assert decide(A, first, operator=OperatorsList(everything=True)).sentence == "--prebound all says so"
    assert not decide(A, first, operator=OperatorsList(frozenset({B}))).is_prebound


def test_the_kernels_ids_alone_make_no_gpu_prebound() -> None:
    hints = kernel_ids("vfio-pci.ids=10de:2330")
    nvidia = function(A, "nvidia")
    assert not decide(
        A, OriginalDriver(A, "nvidia"), operator=NOBODY, hints=hints, function=nvidia
    ).is_prebound


@pytest.mark.parametrize(
    ("command_line", "expected"),
    [
        ("", ()),
        ("quiet vfio-pci.ids=10de:2330 ro", (KernelId(0x10DE, 0x2330),)),
        ("vfio_pci.ids=10de:2330", (KernelId(0x10DE, 0x2330),)),
        ("vfio-pci.ids=10de:2330,1002:74a1", (KernelId(0x10DE, 0x2330), KernelId(0x1002, 0x74A1))),
        ("vfio-pci.ids=10de:1 vfio_pci.ids=10de:2", (KernelId(0x10DE, 1), KernelId(0x10DE, 2))),
        ('"vfio-pci.ids=10de:1,10de:2"', (KernelId(0x10DE, 1), KernelId(0x10DE, 2))),
        ('x="a vfio-pci.ids=10de:1 b"', ()),
        ("vfio-pci.ids=10DE:2330:10de:1839", (KernelId(0x10DE, 0x2330, 0x10DE, 0x1839),)),
        (
            "vfio-pci.ids=10de:ffffffff:ffffffff:ffffffff:030000:ff0000",
            (KernelId(0x10DE, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0x030000, 0xFF0000),),
        ),
        ("vfio-pci.ids=0x10de:0x2330", (KernelId(0x10DE, 0x2330),)),
        ("vfio-pci.ids=10de", ()),
        ("vfio-pci.ids=,10de:2330,", (KernelId(0x10DE, 0x2330),)),
        ("vfio-pci.ids=10de:zzzz,10de:2330", (KernelId(0x10DE, 0x2330),)),
        ("vfio-pci.ids=1:2:3:4:5:6:7", ()),
        ("vfio-pci.ids", ()),
        ("xvfio-pci.ids=10de:2330", ()),
        ("ro -- vfio-pci.ids=10de:2330", ()),
        ("vfio-pci.disable_vga=1", ()),
    ],
)
def test_the_kernel_command_line_is_parsed_in_full(command_line: str, expected: tuple[KernelId, ...]) -> None:
    assert kernel_ids(command_line) == expected


@pytest.mark.parametrize(
    ("entry", "matches"),
    [
        ("10de:2330", True),
        ("10de:2331", False),
        ("1002:2330", False),
        ("10de:ffffffff", True),
        ("10de:ffffffff:ffffffff:ffffffff:030000:ff0000", True),
        ("10de:ffffffff:ffffffff:ffffffff:040000:ff0000", False),
        ("10de:2330:10de:1839", True),
    ],
)
def test_a_hint_compares_vendor_and_device_and_class(entry: str, matches: bool) -> None:
    (found,) = kernel_ids(f"vfio-pci.ids={entry}")
    assert found.matches(function(A, "vfio-pci")) is matches


def test_a_function_whose_ids_cannot_be_read_matches_no_hint() -> None:
    (hint,) = kernel_ids("vfio-pci.ids=10de:2330")
    assert not hint.matches(function(A, "vfio-pci", vendor=""))
