"""The actors' interfaces to the outside, as protocols. An actor knows only these; an adaptor, or a fake of the
simulation, implements each. Three files, so that a daemon without claims, Kubernetes Events and HTTP endpoints loads
`node.py` alone."""
