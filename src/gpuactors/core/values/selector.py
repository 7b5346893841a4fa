"""Selectors, which choose the offered PCI functions, as an operator writes them (`vendor=10de,class=03`).

A function is chosen if it meets at least one selector, and no selector with `!`: these exclude functions that others
choose, whatever the order of the selectors. A mediated device is chosen by the function that it is a part of, or by its
type (`mdev=nvidia-593`, `!mdev=NVIDIA A10-24Q`).

Must not read a host: a selector is compared with facts that an adaptor has read.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

EXCLUDE_MARK: Final = "!"

SELECTOR_KEYS: Final = ("vendor", "device", "class", "address", "mdev")
"""The keys of a selector, in the order of its text."""

_ID = re.compile(r"[0-9a-f]{4}")
_CLASS = re.compile(r"(?P<digits>(?:[0-9a-f]{2}){0,3})(?P<any>x*)")
_ADDRESS = r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<bus>[0-9a-f]{2}):(?P<slot>[01][0-9a-f])\.(?P<fn>[0-7])"


class Selector(Struct, frozen=True, gc=False):
    """The properties of the PCI functions that are chosen, or excluded: every part that is not None must match.

    `vendor` and `device` are four lower-case hex digits, `class_prefix` the first 2, 4 or 6 hex digits of the
    class code (base class, sub-class, programming interface: PCI Code and ID Assignment Specification),
    `address` is `dddd:bb:dd.f`, all without `0x`.
    """

    vendor: str | None = None
    device: str | None = None
    class_prefix: str | None = None
    address: str | None = None
    mdev: str | None = None
    """The id or the name of the type of a mediated device, in lower case, with `_` for white space. No function meets
    such a selector."""
    exclude: bool = False
    """True if a function that meets it is excluded, whatever else chooses it."""
    resource: str | None = None
    """The operator's resource of what it chooses (`own_resources.py`); None: it chooses alone."""
    names_only: bool = False
    """True if it names what others choose, and chooses nothing itself."""

    def __str__(self) -> str:
        """Return the selector as on the command line: `parse_selector` reads it, or `parse_rule` if it has a
        resource."""
        values = (self.vendor, self.device, self.class_prefix, self.address, self.mdev)
        parts = [f"{key}={value}" for key, value in zip(SELECTOR_KEYS, values, strict=True) if value]
        before = EXCLUDE_MARK if self.exclude else f"{self.resource}=" if self.resource is not None else ""
        return before + ",".join(parts)


def parse_selector(text: str) -> Selector:
    """Read `KEY=VALUE,…` or `!KEY=VALUE,…` with the keys vendor, device, class, address and mdev.

    The `!` is written once, before the first key: the whole selector excludes.

    `0x` and upper case are accepted; a class may end in `x` for "any" (`03xxxx` is `03`); an address may
    leave out its domain (`23:00.0` is `0000:23:00.0`); of a type of mediated devices upper case and white space do not
    count. Raises ValueError with a sentence that names the key
    and the remedy.
    """
    values: dict[str, str] = {}
    exclude = text.lstrip().startswith(EXCLUDE_MARK)
    for part in text.lstrip().removeprefix(EXCLUDE_MARK).split(","):
        key, equals, value = part.partition("=")
        key, value = key.strip(), value.strip().lower()
        if not equals:
            raise ValueError(
                f"selector {text!r}: {part.strip()!r} is not KEY=VALUE; "
                "write for example vendor=10de,class=03"
            )
        if key.startswith(EXCLUDE_MARK):
            raise ValueError(
                f"selector {text!r}: {EXCLUDE_MARK} stands once, before the whole selector, which then leaves out what "
                f"meets all of it; write {EXCLUDE_MARK}{key.lstrip(EXCLUDE_MARK)}={value} as a selector of its own"
            )
        if key not in SELECTOR_KEYS:
            raise ValueError(
                f"selector {text!r}: unknown key {key!r}; the keys are {', '.join(SELECTOR_KEYS)}"
            )
        if key in values:
            raise ValueError(
                f"selector {text!r}: {key} is given twice; give a second selector for a second {key}"
            )
        values[key] = value
    return Selector(
        vendor=_id(text, "vendor", values["vendor"]) if "vendor" in values else None,
        device=_id(text, "device", values["device"]) if "device" in values else None,
        class_prefix=_class_prefix(text, values["class"]) if "class" in values else None,
        address=_address(text, values["address"]) if "address" in values else None,
        mdev=_mediated_type(text, values["mdev"]) if "mdev" in values else None,
        exclude=exclude,
    )


def matches(selector: Selector, *, vendor: str, device: str, class_code: str, address: str) -> bool:
    """Return whether a PCI function meets the selector; the facts may be spelt as in sysfs (`0x10de`, `0x030200`)."""
    return selector.mdev is None and matches_function(
        selector, vendor=vendor, device=device, class_code=class_code, address=address
    )


def matches_type(selector: Selector, type_id: str, type_name: str) -> bool:
    """Return whether a type of mediated devices meets the selector's `mdev`, if it has one."""
    return selector.mdev is None or selector.mdev in (_one_word(type_id), _one_word(type_name))


def matches_function(selector: Selector, *, vendor: str, device: str, class_code: str, address: str) -> bool:
    """Return whether a function meets the selector's parts about functions."""
    return (
        (selector.vendor is None or selector.vendor == _bare(vendor))
        and (selector.device is None or selector.device == _bare(device))
        and (selector.class_prefix is None or _bare(class_code).startswith(selector.class_prefix))
        and (selector.address is None or selector.address == address.lower())
    )


def _one_word(value: str) -> str:
    return "_".join(value.lower().split())


def _mediated_type(text: str, value: str) -> str:
    if not (word := _one_word(value)):
        raise ValueError(
            f"selector {text!r}: mdev is empty; write the id or the name of a type, for example mdev=nvidia-593"
        )
    return word


def _bare(value: str) -> str:
    return value.lower().removeprefix("0x")


def _id(text: str, key: str, value: str) -> str:
    digits = _bare(value)
    if not _ID.fullmatch(digits):
        raise ValueError(
            f"selector {text!r}: {key}={value} is not a PCI id; write four hex digits, for example "
            f"{'vendor=10de' if key == 'vendor' else 'device=2330'}"
        )
    return digits


def _class_prefix(text: str, value: str) -> str:
    code = _bare(value)
    match = _CLASS.fullmatch(code)
    # With an `x` the code is written out in full, so that 03xx cannot be mistaken for a class of four digits.
    if match is None or not match["digits"] or (match["any"] and len(code) != 6):
        raise ValueError(
            f"selector {text!r}: class={value} is not the start of a PCI class code; "
            "write two, four or six hex digits, for example class=03, class=0302 or class=0302xx"
        )
    return match["digits"]


def _address(text: str, value: str) -> str:
    address = full_address(value)
    if address is None:
        raise ValueError(
            f"selector {text!r}: address={value} is not a PCI address; "
            "write it as lspci -D does, for example address=0000:23:00.0"
        )
    return address


def full_address(text: str) -> str | None:
    """Return a PCI address, as a person writes it, as sysfs spells it: `23:00.0` is `0000:23:00.0`. None if it is no
    PCI address."""
    match = re.fullmatch(_ADDRESS, text.strip().lower())
    if match is None:
        return None
    # The kernel prints "%04x:%02x:%02x.%d" (drivers/pci/probe.c, pci_setup_device): the domain is padded to
    # four digits and longer only where it has to be (Intel VMD starts at 10000).
    domain = int(match["domain"] or "0", 16)
    return f"{domain:04x}:{match['bus']}:{match['slot']}.{match['fn']}"
