"""Tools for actors on trio that know nothing of GPUs."""
