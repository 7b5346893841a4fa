"""Which kernels to run on; without a word the default suite."""

from __future__ import annotations

import pytest

from tests.vm.kernels import KERNELS


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("virtual machine")
    group.addoption(
        "--kernel",
        action="append",
        default=[],
        choices=tuple(KERNELS),
        help="run every scenario on this kernel; may be given more than once",
    )
    group.addoption("--all-kernels", action="store_true", help="run every scenario on every kernel")
