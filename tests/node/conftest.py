"""What every test on the real node has: the fake host, the API server, the image, and the daemon as it is installed.

The node is up when pytest starts, and pytest runs in its namespaces (`run.py`): one test at a time. Where there are
several nodes, a worker of pytest runs in each, and what follows the reports is done by the pytest that started them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.node.books import Books, Sampler
from tests.node.cluster import Api
from tests.node.daemonset import IMAGE, OTHER_IMAGE
from tests.node.fake_host import FakeHost, opened_host
from tests.node.images import add_image
from tests.node.node import Node
from tests.node.run import AGAIN, FAILED, GATES, NO_DOMAINS, NO_PLUGINS, NODES, RELEASES
from tests.support.patience import patient

RESULTS: Final = Path(__file__).resolve().parents[2] / "var" / "node"
SEVERAL: Final = Path(__file__).parent / "several"
SCENARIO_S: Final = 240.0
MARK: Final = "node_set"
LONG: Final = "long"
DOMAINS: Final = "nvidias_domains"
PLUGINS: Final = "nvidias_plugins"
BY_NAME: Final = "by_name"
LACKING: Final = {DOMAINS: NO_DOMAINS, PLUGINS: NO_PLUGINS}
"""The marks of scenarios that need programs, and the variable that is set where they are not there."""

_rows: list[tuple[str, str, float]] = []
_failed: dict[str, None] = {}
"""The scenarios that have failed, in their setup and teardown as well."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}(name): the gates that a scenario needs: A (the default) or B")
    config.addinivalue_line("markers", f"{LONG}: a minute or more; played first")
    config.addinivalue_line("markers", f"{BY_NAME}: played only where its file is named")
    config.addinivalue_line("markers", f"{DOMAINS}: needs NVIDIA's controller and daemon of compute domains")
    config.addinivalue_line("markers", f"{PLUGINS}: needs NVIDIA's kubelet plugins and a mock of NVML")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """The scenarios of one node, or those of a cluster of several."""
    of_several = SEVERAL in (collection_path, *collection_path.parents)
    is_scenario = collection_path.name.startswith("test_") or collection_path == SEVERAL
    return True if is_scenario and of_several != (NODES in os.environ) else None


def _gates() -> str:
    return os.environ.get(GATES) or (Path(os.environ["K8S_DIR"]) / "run" / "set").read_text().strip()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses the scenarios of the gates and the programs that the node runs with."""
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    if mine and "K8S_INSIDE" not in os.environ:
        raise pytest.UsageError("tests/node runs inside the node's namespaces: ./do node")
    lacking = {mark for mark, variable in LACKING.items() if variable in os.environ}
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker(MARK)
        wanted = "A" if mark is None else str(mark.args[0])
        fits = wanted in (_gates(), "any") and not any(map(item.get_closest_marker, lacking))
        if item.get_closest_marker(BY_NAME) is not None:
            fits = fits and any(item.path.name in argument for argument in config.args)
        (chosen if item not in mine or fits else others).append(item)
        item.add_marker(pytest.mark.timeout(patient(SCENARIO_S)))
    # Several nodes take scenarios from each other: none is to begin the longest one when the others have ended.
    items[:] = sorted(chosen, key=lambda item: item.get_closest_marker(LONG) is None)
    if others:
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report: Any = yield
    if report.when == "call" and report.failed:
        for fixture in getattr(item, "funcargs", {}).values():
            if isinstance(fixture, Node):
                report.sections.append(("the node", fixture.what_is_there()))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of whichever worker. One that has ended in a scenario is reported without a time."""
    if report.failed:
        _failed[report.nodeid] = None
    if report.when == "call" or (report.failed and report.when != "teardown"):
        _rows.append((report.nodeid.removeprefix("tests/node/"), report.outcome, report.duration))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table of scenarios with their times."""
    if not _rows:
        return
    lines = [f"With {os.environ.get(RELEASES, '')}:", "", "| scenario | result | s |", "|---|---|---|"]
    lines += [f"| {name} | {outcome} | {seconds:.1f} |" for name, outcome, seconds in _rows]
    RESULTS.mkdir(parents=True, exist_ok=True)
    several = "-several" if NODES in os.environ else ""
    (RESULTS / f"scenarios-{_gates()}{several}{os.environ.get(AGAIN, '')}.md").write_text(
        "\n".join(lines) + "\n"
    )
    (RESULTS / FAILED).write_text("".join(f"{name}\n" for name in _failed))
    terminalreporter.write_line("")
    for line in lines:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def host() -> Iterator[FakeHost]:
    """The PCI devices of the node: none at first."""
    with opened_host() as opened:
        yield opened


@pytest.fixture(scope="session")
def images() -> None:
    """The image under two names."""
    add_image(Path(os.environ["TEST_NODE_IMAGE"]), IMAGE, OTHER_IMAGE)


@pytest.fixture(scope="session")
def sampler(host: FakeHost) -> Iterator[Sampler]:
    """Looks at the books all the time."""
    sampling = Sampler(host)
    with sampling.watching():
        yield sampling


@pytest.fixture(scope="session")
def whole_node(host: FakeHost, images: None, sampler: Sampler) -> Iterator[Node]:
    """The node for the whole session; tests take `node`."""
    node = Node(host, Api(), Books(host), sampler)
    try:
        yield node
    finally:
        node.uninstall()


@pytest.fixture
def node(whole_node: Node) -> Iterator[Node]:
    """The node without a GPU or a tenant; what is installed is as the test before has left it."""
    began = time.monotonic()
    whole_node.reset()
    whole_node.said(f"the node is empty after {time.monotonic() - began:.1f} s")
    yield whole_node
    whole_node.settled()
    whole_node.check_always()
