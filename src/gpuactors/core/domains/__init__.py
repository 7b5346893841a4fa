"""The pure core of compute domains: the node's label, readiness, what the claim of an IMEX channel needs."""
