"""Whether `gpuactors_simulation` can be used: it is a distribution of its own, `gpuactors[simulation]`.

A file of its own: two commands need it, and the completion of one.
"""

from __future__ import annotations

from gpuactors import VERSION


def unavailable() -> str:
    """Return why `gpuactors_simulation` cannot be used, with the remedy; empty if it can be."""
    try:
        from gpuactors_simulation import VERSION as installed
    except ModuleNotFoundError:
        fault = "is not installed"
    else:
        if installed == VERSION:
            return ""
        fault = (
            f"is installed in version {installed}"  # `pip install --upgrade gpuactors` alone leaves it behind
        )
    return f"the package gpuactors-simulation {fault}: pip install 'gpuactors[simulation]=={VERSION}'"
