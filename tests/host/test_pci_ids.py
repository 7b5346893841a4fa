"""Names of PCI ids: which file, and what is read from it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from gpuactors.host.pci_ids import SHIPPED, PciIds
from gpuactors.ports.errors import HostError

SMALL = """\
# comment
10d  not a vendor
10de  NVIDIA Corporation
\t0008  NV1
\t\t10de 2330  a subsystem, not a device
# comment between
\t2330  GH100 [H100 SXM5 80GB]
\t2330  a second one

\t2331  behind an empty line
10df  Emulex Corporation
\t2332  another vendor's
C 03  Display controller
\t00  VGA compatible controller
"""


def small(path: Path, text: bytes = SMALL.encode()) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


@pytest.mark.parametrize(
    ("vendor", "device", "name"),
    [
        ("10de", "0008", "NV1"),
        ("10de", "2330", "GH100 [H100 SXM5 80GB]"),
        ("10de", "2331", "behind an empty line"),
        ("10de", "2332", None),
        ("10df", "2332", "another vendor's"),
        ("10d", "2330", None),
        ("", "2330", None),
        ("ffff", "2330", None),
        ("C 03", "00", None),
    ],
)
def test_lookup(tmp_path: Path, vendor: str, device: str, name: str | None) -> None:
    names = PciIds.open(small(tmp_path / "pci.ids"))
    assert names.lookup(vendor, device) == name


def test_last_line_without_an_end(tmp_path: Path) -> None:
    names = PciIds.open(small(tmp_path / "pci.ids", b"10de  NVIDIA\n\t2330  H100"))
    assert names.lookup("10de", "2330") == "H100"
    assert PciIds(small(tmp_path / "one", b"10de  NVIDIA")).lookup("10de", "2330") is None


def test_old_copies_in_latin_1(tmp_path: Path) -> None:
    names = PciIds.open(small(tmp_path / "pci.ids", b"10de  NVIDIA\n\t2330  \xb5GPU\n\t2331  \xc2\xb5GPU\n"))
    assert names.lookup("10de", "2330") == "µGPU"
    assert names.lookup("10de", "2331") == "µGPU"


def test_the_shipped_file_names_the_models_where_none_is_given() -> None:
    names = PciIds.open(None)
    assert names.file == SHIPPED
    assert names.lookup("10de", "2330") == "GH100 [H100 SXM5 80GB]"
    assert (SHIPPED.parent / "LICENSE.pci.ids").is_file()


def test_a_compressed_file(tmp_path: Path) -> None:
    path = small(tmp_path / "pci.ids.gz", gzip.compress(SMALL.encode()))
    assert PciIds.open(path).lookup("10de", "0008") == "NV1"


def test_an_explicit_file_is_the_only_source(tmp_path: Path) -> None:
    names = PciIds.open(small(tmp_path / "own", b"1234  QEMU\n\t11e8  edu\n10de  N\n\t2331  x\n"))
    assert names.lookup("1234", "11e8") == "edu"
    assert names.lookup("10de", "2330") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"root:x:0:0::/root:/bin/sh\n",
        b"1002  AMD\n\t73bf  Navi 21\n",
        b"10de  NVIDIA\n",
        b"\t2330  GH100\n",
    ],
)
def test_a_file_that_names_no_gpu_of_nvidias_is_refused(tmp_path: Path, content: bytes) -> None:
    """Any file was taken: every GPU got the name of its number, and kubelet's devices another resource."""
    with pytest.raises(
        HostError, match=r"other has no device of vendor 10de, so it is no pci\.ids .*--pci-ids"
    ):
        PciIds.open(small(tmp_path / "other", content))


def test_a_packed_file_that_is_damaged_or_without_end_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(SMALL.encode() * 50))
    packed[20] ^= 0xFF
    (tmp_path / "a.gz").write_bytes(packed)
    (tmp_path / "b.gz").write_bytes(gzip.compress(bytes(1 << 26)))
    for name in ("a.gz", "b.gz"):
        with pytest.raises(HostError, match="--pci-ids"):
            PciIds.open(tmp_path / name)


@pytest.mark.parametrize("content", [None, b"not gzip"])
def test_an_explicit_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "missing.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HostError, match=r"missing\.gz .*--pci-ids"):
        PciIds.open(str(path))


def test_a_section_is_kept_when_the_file_goes(tmp_path: Path) -> None:
    path = small(tmp_path / "pci.ids")
    names = PciIds.open(path)
    assert names.lookup("10de", "0008") == "NV1"
    path.unlink()
    assert names.lookup("10de", "2330") == "GH100 [H100 SXM5 80GB]"
    with pytest.raises(HostError, match=r"pci\.ids"):
        names.lookup("10df", "2332")


def test_a_name_controls_no_terminal(tmp_path: Path) -> None:
    """It is shown by every command, and somebody gave us the file."""
    names = PciIds.open(
        small(tmp_path / "pci.ids", b"10de  N\n\t2330  GH100 [\x1b[2JH100\xe2\x80\xae]\n\t2331  \x9b31m\n")
    )
    assert names.lookup("10de", "2330") == r"GH100 [\x1b[2JH100\u202e]"
    assert names.lookup("10de", "2331") == r"\x9b31m"


def test_garbage_is_no_name(tmp_path: Path) -> None:
    names = PciIds(small(tmp_path / "pci.ids", b"\x00\xff" * 1000 + b"\n10de  \n\t\n\t23\n\tzzzz  x\n"))
    assert names.lookup("10de", "2330") is None
