"""A configuration file that is looked at again: what its changes mean. Of a wrong one nothing counts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gpuactors.actors import config_watcher
from gpuactors.actors.config_watcher import CONFIG_LOOK_S
from gpuactors.config import DECLARATIONS, Config, ConfigError, Resolved, resolve
from gpuactors.config.reload import FOLLOWED, OF_READING, changed
from gpuactors.core.events import Event
from gpuactors.core.events.daemon import ConfigUnused, ConfigUsed
from gpuactors.core.values.selector import parse_selector
from gpuactors.daemon.config_file import REFUSED_BACKOFF_JITTER, REFUSED_BACKOFF_S, SETTLE_S, ConfigFile

BIG = "example.com/big=vendor=10de,device=2330"


class Place:
    """A file as kubelet mounts it: a link through `..data`, which one rename replaces."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "gpuactors.yaml"
        self.versions = 0
        self.path.symlink_to("..data/gpuactors.yaml")

    def put(self, text: str) -> None:
        """Another version of the ConfigMap comes."""
        self.versions += 1
        version = self.directory / f"..{self.versions}"
        version.mkdir()
        (version / "gpuactors.yaml").write_text(text)
        self.lead_to(version.name)

    def lead_to(self, name: str) -> None:
        """The link `..data` leads there now."""
        new = self.directory / "..data_tmp"
        new.symlink_to(name)
        new.rename(self.directory / "..data")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    place.put(json.dumps({"select": ["vendor=10de"]}))
    return place


def opened(place: Place, **flags: Any) -> ConfigFile:
    again = partial(resolve, {"config": str(place.path), **flags}, {})
    return ConfigFile(again(), again)


def select_of(file: ConfigFile) -> str:
    return next(setting.value for setting in file.about().settings if setting.key == "select")


async def test_a_file_as_at_the_start_means_nothing(place: Place, autojump_clock: MockClock) -> None:
    file = opened(place)
    assert await file.look() is None
    place.put(json.dumps({"select": ["vendor=10de"]}) + "  # as before")
    assert await file.look() is None


async def test_a_change_that_a_daemon_follows_is_used_once(place: Place, autojump_clock: MockClock) -> None:
    file = opened(place)
    place.put(json.dumps({"select": ["vendor=1002"], "resource": [BIG]}))
    event = await file.look()
    assert isinstance(event, ConfigUsed)
    assert event.keys == ("resource", "select")
    assert event.selectors == Config(select=("vendor=1002",), resource=(BIG,)).selectors
    assert select_of(file) == '["vendor=1002"]'
    assert await file.look() is None


async def test_of_a_change_that_needs_a_restart_nothing_is_used_until_it_is_taken_back(
    place: Place, autojump_clock: MockClock
) -> None:
    file = opened(place)
    place.put(json.dumps({"select": ["vendor=1002"], "dra": "on", "events": "on"}))
    assert await file.look() == ConfigUnused("", ("dra", "events"))
    assert select_of(file) == '["vendor=10de"]'
    assert await file.look() is None
    place.put(json.dumps({"select": ["vendor=10de"]}))
    assert await file.look() == ConfigUsed((), (parse_selector("vendor=10de"),), ())


async def test_what_a_flag_has_does_not_change_with_the_file(place: Place, autojump_clock: MockClock) -> None:
    file = opened(place, select=("vendor=8086",))
    place.put(json.dumps({"select": ["vendor=1002"]}))
    assert await file.look() is None


WRONG: dict[str, tuple[Callable[[Place], None], str]] = {
    "an unknown key": (lambda place: place.put('{"selekt": []}'), "unknown key"),
    "a half": (lambda place: place.put('{"select": ["vend'), "cannot be read"),
    "settings that exclude each other": (
        lambda place: place.put('{"partition_activation": "on"}'),
        "needs partition_command",
    ),
    "a link to nowhere": (lambda place: place.lead_to("..9"), "No such file"),
}


@pytest.mark.parametrize("how", WRONG)
async def test_a_wrong_file_is_refused_once_and_the_next_one_counts(
    place: Place, how: str, autojump_clock: MockClock
) -> None:
    file = opened(place)
    make, said = WRONG[how]
    make(place)
    event = await file.look()
    assert isinstance(event, ConfigUnused)
    assert said in event.reason
    assert await file.look() is None
    place.put(json.dumps({"select": ["vendor=1002"]}))
    assert isinstance(await file.look(), ConfigUsed)


async def test_a_file_that_is_being_written_is_read_when_it_is_whole(
    place: Place, autojump_clock: MockClock
) -> None:
    file = opened(place)
    (place.directory / "..1/gpuactors.yaml").write_text("select: [vendor=1002")
    seen: list[object] = []
    async with trio.open_nursery() as nursery:

        async def look() -> None:
            seen.append(await file.look())

        nursery.start_soon(look)
        await trio.sleep(SETTLE_S / 2)
        (place.directory / "..1/gpuactors.yaml").write_text("select: [vendor=1002, class=03]")
    assert seen == [None]
    assert isinstance(await file.look(), ConfigUsed)


async def test_a_file_that_is_written_while_it_is_read_does_not_count(
    place: Place, autojump_clock: MockClock
) -> None:
    def again() -> Resolved:
        read = resolve({"config": str(place.path)}, {})
        place.put(json.dumps({"select": ["vendor=1002", "class=03"]}))
        return read

    file = ConfigFile(resolve({"config": str(place.path)}, {}), again)
    place.put(json.dumps({"select": ["vendor=1002"]}))
    assert await file.look() is None
    assert select_of(file) == '["vendor=10de"]'


async def test_a_file_whose_entries_cannot_be_matched_now_is_read_again(
    place: Place, autojump_clock: MockClock
) -> None:
    """Without another change of the file: the API server was away."""
    away = True
    first = resolve({"config": str(place.path)}, {})

    def again() -> Resolved:
        if away:
            raise ConfigError("the Node cannot be read")
        return resolve({"config": str(place.path)}, {})

    file = ConfigFile(first, again)
    assert await file.look() == ConfigUnused("the Node cannot be read")
    assert await file.look() is None
    away = False
    await trio.sleep(REFUSED_BACKOFF_S[0])
    assert await file.look() == ConfigUsed((), first.config.selectors, ())


class Counted:
    """Resolves the file, and counts how often."""

    def __init__(self, place: Place) -> None:
        self._again = partial(resolve, {"config": str(place.path)}, {})
        self.reads = 0

    def __call__(self) -> Resolved:
        self.reads += 1
        return self._again()


async def read_at(file: ConfigFile, counted: Counted, looks: int) -> list[float]:
    """When the file was read, of so many looks."""
    times: list[float] = []
    for _ in range(looks):
        await trio.sleep(CONFIG_LOOK_S)
        before = counted.reads
        await file.look()
        times += [trio.current_time()] * (counted.reads - before)
    return times


async def test_a_refused_file_that_stays_as_it_is_is_read_again_later_each_time(
    place: Place, autojump_clock: MockClock
) -> None:
    counted = Counted(place)
    file = ConfigFile(counted(), counted)
    place.put("[")
    times = await read_at(file, counted, 200)
    pauses = [after - before for before, after in pairwise(times)]
    assert len(pauses) > len(REFUSED_BACKOFF_S)
    for pause_s, plain_s in zip_longest(
        pauses, REFUSED_BACKOFF_S[: len(pauses)], fillvalue=REFUSED_BACKOFF_S[-1]
    ):
        assert plain_s * (1 - REFUSED_BACKOFF_JITTER) <= pause_s <= plain_s + CONFIG_LOOK_S + 2 * SETTLE_S


async def test_a_refused_file_that_changes_is_read_at_once_and_the_pauses_begin_anew(
    place: Place, autojump_clock: MockClock
) -> None:
    counted = Counted(place)
    file = ConfigFile(counted(), counted)
    place.put("[")
    await read_at(file, counted, 100)
    place.put('{"selekt": []}')
    first, second = (await read_at(file, counted, 4))[:2]
    assert trio.current_time() - first > 3 * CONFIG_LOOK_S, "the next look reads it"
    assert second - first <= REFUSED_BACKOFF_S[0] + CONFIG_LOOK_S + 2 * SETTLE_S
    place.put(json.dumps({"select": ["vendor=1002"]}))
    assert isinstance(await file.look(), ConfigUsed)
    assert await read_at(file, counted, 100) == [], "a file in use is read once"


async def test_the_watcher_posts_each_change_at_its_next_look(
    place: Place, autojump_clock: MockClock
) -> None:
    post, inbox = trio.open_memory_channel[Event](4)
    # Without a deadline, to which the clock would jump while a thread reads.
    async with trio.open_nursery() as nursery:
        nursery.start_soon(config_watcher.run, opened(place), post)
        place.put("{}")
        assert isinstance(await inbox.receive(), ConfigUsed)
        assert trio.current_time() >= CONFIG_LOOK_S
        os.unlink(place.path)
        assert isinstance(await inbox.receive(), ConfigUnused)
        nursery.cancel_scope.cancel()


# --- which settings follow --------------------------------------------------------------------------------


def test_each_setting_is_followed_or_needs_a_restart() -> None:
    assert set(FOLLOWED) == {"select", "resource", "resource_name", "vgpu_type"}
    for key in DECLARATIONS:
        keys = changed(Config(), _with(key))
        assert keys.followed == ((key,) if key in FOLLOWED else ())
        assert keys.restart == ((key,) if key not in (*FOLLOWED, *OF_READING) else ())


def _with(key: str) -> Config:
    """The defaults, but for this setting."""
    return Config(**{key: "of no type"})  # type: ignore[arg-type]
