"""That a node has no GPU is said once each time it becomes so."""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors.core.events.host import HostScanned
from gpuactors.core.kinds.presence import NO_GPU_HERE
from gpuactors.core.values.effects import Level, Log
from gpuactors.core.values.model import PciFunction
from tests.core.builders import SETTINGS, Core, gpu


def scanned(core: Core, *functions: PciFunction) -> list[Log]:
    """What a scan that finds these functions says of it."""
    core.pass_time(core.state.daemon.settings.resync_interval_s + 1)
    effects = core.feed(HostScanned(core.scan, functions))
    return [effect for effect in effects if isinstance(effect, Log) and effect.name == "host.no_gpus"]


def test_a_node_without_a_gpu_is_a_warning_once_and_again_when_the_last_one_left() -> None:
    core = Core()
    said = [Log(Level.WARNING, "host.no_gpus", {"reason": NO_GPU_HERE})]
    assert scanned(core) == said
    assert scanned(core) == [], "a later scan says nothing new"
    assert scanned(core, gpu("23:00.0")) == []
    assert scanned(core) == said


def test_a_node_whose_gpus_nobody_wants_is_none() -> None:
    assert scanned(Core(settings=replace(SETTINGS, device_plugin=False))) == []
