"""The doctor on Grace: the variant driver and the EGMs are checked before a virtual machine is to get them."""

from __future__ import annotations

import json

from gpuactors.cli.doctor.finding import Check, Finding, Level
from gpuactors.cli.inspect.report import explained_json, explained_text
from gpuactors.cli.inspect.view import explain
from gpuactors.config import resolve
from tests.cli.doctor.rig import GPU, SECOND, Patient, findings, open_patient
from tests.process.node import address
from tests.support.egm import make_egm

PASS, WARN = Level.PASS, Level.WARN
KERNEL = "6.8.0-1024-nvidia-64k"
VARIANT = "nvgrace_gpu_vfio_pci"
MODALIAS = "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00\n"


def kernel_with_variant(patient: Patient, *, egm_module: bool = False) -> None:
    """The kernel has a variant of vfio-pci for the model of the rig's GPUs."""
    patient.put("/proc/sys/kernel/osrelease", f"{KERNEL}\n")
    modules = f"/lib/modules/{KERNEL}"
    patient.put(f"{modules}/modules.alias", f"alias vfio_pci:v000010DEd00002330sv*sd*bc*sc*i* {VARIANT}\n")
    installed = [VARIANT, "vfio_pci", *["nvgrace_egm"] * egm_module]
    patient.put(f"{modules}/modules.dep", "".join(f"kernel/drivers/vfio/{name}.ko:\n" for name in installed))
    for gpu in (GPU, SECOND):
        if gpu in patient.node.tree.functions:
            patient.node.tree.set_attribute(gpu, "modalias", MODALIAS.encode())


def of(check: Check, patient: Patient) -> list[Finding]:
    return [finding for finding in findings(patient.examined(pre=True)) if finding.check is check]


def one(check: Check, level: Level, patient: Patient, *words: str) -> None:
    (finding,) = of(check, patient)
    assert finding.level is level
    assert all(word in f"{finding.message} {finding.remedy}" for word in words), finding


def test_a_host_without_variants_and_egm_has_no_such_finding() -> None:
    with open_patient() as patient:
        patient.gpu()
        patient.put("/proc/sys/kernel/osrelease", f"{KERNEL}\n")
        assert of(Check.VARIANT_DRIVER, patient) == of(Check.EGM, patient) == [], "a pod sees no modules"
        patient.put(f"/lib/modules/{KERNEL}/modules.dep", "kernel/drivers/vfio/vfio_pci.ko:\n")
        assert of(Check.VARIANT_DRIVER, patient) == of(Check.EGM, patient) == []


def test_a_gpu_on_vfio_pci_that_has_a_variant_is_named() -> None:
    with open_patient() as patient:
        patient.gpu()
        kernel_with_variant(patient)
        one(Check.VARIANT_DRIVER, WARN, patient, f"{GPU} on vfio-pci", f"modprobe {VARIANT}")


def test_a_variant_that_is_not_loaded_is_named_unless_claims_load_it() -> None:
    with open_patient() as patient:
        patient.gpu(driver="nvidia")
        kernel_with_variant(patient)
        one(Check.VARIANT_DRIVER, WARN, patient, f"{VARIANT} is not loaded", GPU, f"modprobe {VARIANT}")
        patient.flags |= {"dra": "on", "load_modules": "on"}
        one(Check.VARIANT_DRIVER, PASS, patient, "will be loaded for the first claim")


def test_a_gpu_on_its_variant_passes() -> None:
    with open_patient() as patient:
        patient.gpu(driver=VARIANT)
        kernel_with_variant(patient)
        one(Check.VARIANT_DRIVER, PASS, patient, f"{VARIANT} is loaded")


def test_the_module_of_egm_that_is_not_loaded_is_named() -> None:
    with open_patient() as patient:
        patient.gpu(driver=VARIANT)
        kernel_with_variant(patient, egm_module=True)
        one(Check.EGM, WARN, patient, "nvgrace_egm is not loaded", "modprobe nvgrace_egm")
        patient.put("/sys/module/nvgrace_egm/refcnt", "0\n")
        assert of(Check.EGM, patient) == []


def test_an_egm_passes_and_one_without_its_node_does_not() -> None:
    with open_patient() as patient:
        patient.gpu()
        make_egm(patient.node.tree.root, "egm4", [GPU, SECOND])
        one(Check.EGM, PASS, patient, f"/dev/egm4 goes with all of {GPU}, {SECOND}")
        (patient.node.tree.root / "dev/egm4").unlink()
        one(Check.EGM, WARN, patient, "egm4", "has no device node /dev/egm4", "the module that makes it")


def test_a_list_that_is_wrong_is_named() -> None:
    with open_patient() as patient:
        patient.gpu()
        make_egm(patient.node.tree.root, "egm4", ["x"])
        one(Check.EGM, WARN, patient, "/sys/class/egm/egm4, list of GPUs: x is no PCI address")


def test_explain_and_json_have_the_egm_of_a_gpu() -> None:
    with open_patient() as patient:
        patient.gpu()
        patient.gpu(0x24)
        make_egm(patient.node.tree.root, "egm4", [GPU, address(0x25)])
        config = resolve(patient.words(), {}).config
        explained = explain(config, GPU)
        assert f"egm4, /dev/egm4; together with {address(0x25)}" in explained_text(explained)
        assert json.loads(explained_json(explained))["egm"] == {
            "name": "egm4",
            "node": "/dev/egm4",
            "gpus": [GPU, address(0x25)],
        }
        assert json.loads(explained_json(explain(config, SECOND)))["egm"] is None
        (patient.node.tree.root / "dev/egm4").unlink()
        assert "device node is missing, so that no container gets it" in explained_text(explain(config, GPU))
