"""Wires the CDI files of the device plugin; imported with `--allocate-as cdi` only.

A file of its own: a daemon without them imports none of `acts/`.
"""

from __future__ import annotations

from gpuactors.acts.blocking_runner import OneThread
from gpuactors.acts.cdi_watch import MountedDirectory
from gpuactors.acts.disk import RealDisk
from gpuactors.acts.spec_files import SpecFiles
from gpuactors.config import Config
from gpuactors.ports.node import Reachable, SpecDirectory


def directory_of(config: Config) -> SpecDirectory:
    """Make the adaptor of the CDI directory."""
    return SpecFiles(RealDisk(), str(config.cdi_dir), OneThread("CDI files"))


def reached_by(config: Config) -> Reachable:
    """Return the directory as far as Kata and the container runtime reach the daemon by it."""
    return MountedDirectory(str(config.cdi_dir))
