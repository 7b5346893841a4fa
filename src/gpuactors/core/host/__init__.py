"""The use of the groups on the host."""
