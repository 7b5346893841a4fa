"""The examples at the end of each command's help. A test parses each of them as the program does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EXAMPLES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "": (
        ("gpuactors inspect --watch", "the GPUs of this node, kept up to date"),
        ("gpuactors explain 23:00.0", "one GPU: owner, health, reason"),
        ("gpuactors doctor", "the problems of this node"),
        ("gpuactors simulate", "try it without a GPU"),
    ),
    "run": (
        ("gpuactors run --log-format=console", "a log for people"),
        ("gpuactors run --config /etc/gpuactors.toml", "settings from a file"),
        ("gpuactors run --select '!address=0000:23:00.0'", "all GPUs but one"),
        ("gpuactors run --dra on --prebound all", "GPUs as claims, too"),
    ),
    "inspect": (
        ("gpuactors inspect", "each resource and GPU"),
        ("gpuactors inspect --watch", "the same, kept up to date"),
        ("gpuactors inspect -o wide", "cdev, cause, since, owner, VM, holder"),
        ("gpuactors inspect -w -o json", "a line of JSON for each change"),
    ),
    "explain": (
        ("gpuactors explain 0000:23:00.0", "a GPU by its PCI address"),
        ("gpuactors explain 23:00.0 -o yaml", "without the PCI domain"),
        ("gpuactors explain default/vm-1", "a pod, ResourceClaim or ComputeDomain"),
        ("gpuactors explain vm/default/vm-1", "the pod of a KubeVirt virtual machine"),
        ("gpuactors explain GH100_H100_PCIE", "a resource, without its domain"),
        ("gpuactors explain NVIDIA_A40-12Q", "the devices of a vGPU profile"),
    ),
    "doctor": (
        ("gpuactors doctor", "problems of this node, and remedies"),
        ("gpuactors doctor --pre", "on a host, before installation"),
        ("gpuactors doctor --before-nvidia", "before NVIDIA's DRA driver starts"),
        ("gpuactors doctor --wait 60", "after an update: until nothing fails"),
        ("gpuactors doctor --kubevirt FILE", "also what KubeVirt permits"),
        ("gpuactors doctor -o json", "for programs"),
    ),
    "simulate": (
        ("gpuactors simulate", "the incident"),
        ("gpuactors simulate --list", "the names of all scenarios"),
        ("gpuactors simulate --scenario claims", "another scenario"),
    ),
    "replay": (
        ("gpuactors replay /var/lib/gpuactors", "what has happened"),
        ("gpuactors replay /var/lib/gpuactors --html a.html", "the same as a page"),
        ("gpuactors replay DIR --device 0000:23:00.0", "one GPU only"),
        ("gpuactors replay DIR --since 2026-11-21T06:15:57", "from this time on"),
    ),
    "bundle": (("gpuactors bundle > gpuactors-NODE.tar.gz", "for a report of a fault"),),
    "config": (("gpuactors config show", "each setting with its source"),),
    "config show": (
        ("gpuactors config show", "the running daemon's settings"),
        ("gpuactors config show --dra on -o yaml", "the settings with these flags"),
    ),
    "config check": (
        ("gpuactors config check --config FILE", "all entries"),
        ("gpuactors config check --config FILE --node a1", "its settings"),
    ),
    "config schema": (("gpuactors config schema > schema.json", "for an editor"),),
    "completion": (
        ("source <(gpuactors completion bash)", "in ~/.bashrc"),
        ("source <(gpuactors completion zsh)", "in ~/.zshrc, after compinit"),
        ("gpuactors completion fish | source", "in ~/.config/fish/config.fish"),
    ),
}
"""The examples of each command, by its words: each line with what it is for."""


def epilog(words: str) -> str:
    """Return the end of the help of the command that these words call; its lines are not to be folded."""
    examples = EXAMPLES[words]
    longest = max(len(line) for line, _ in examples)
    return "\b\nExamples:\n" + "\n".join(f"  {line:<{longest}}  # {what}" for line, what in examples)
