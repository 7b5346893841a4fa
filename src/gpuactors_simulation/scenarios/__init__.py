"""The scenarios that `gpuactors simulate` can play, one file each."""

from __future__ import annotations

from typing import Final

from gpuactors_simulation.scenarios.claims import CLAIMS
from gpuactors_simulation.scenarios.compute_domain import COMPUTE_DOMAIN
from gpuactors_simulation.scenarios.external_holder import EXTERNAL_HOLDER
from gpuactors_simulation.scenarios.incident import INCIDENT
from gpuactors_simulation.scenarios.kubelet_restart import KUBELET_RESTART
from gpuactors_simulation.scenarios.late_binding import LATE_BINDING
from gpuactors_simulation.scenarios.new_model import NEW_MODEL
from gpuactors_simulation.scenarios.prebound import PREBOUND
from gpuactors_simulation.scenarios.two_plugins import TWO_PLUGINS
from gpuactors_simulation.scenarios.unplug import UNPLUG
from gpuactors_simulation.script import Scenario

SCENARIOS: Final[tuple[Scenario, ...]] = (
    INCIDENT,
    EXTERNAL_HOLDER,
    LATE_BINDING,
    NEW_MODEL,
    UNPLUG,
    KUBELET_RESTART,
    TWO_PLUGINS,
    CLAIMS,
    PREBOUND,
    COMPUTE_DOMAIN,
)
