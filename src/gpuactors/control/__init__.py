"""Adaptor: the control socket in the state directory, by which a daemon is asked what it knows and to hand over."""
