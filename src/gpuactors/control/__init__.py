"""Adaptor: the control socket in the state directory, over which a daemon is asked for its status and to hand over."""
