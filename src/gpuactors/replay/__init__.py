"""What `gpuactors replay` does: a journal's events, fed to the same core that saw them first.

Imported by the command line alone.
"""
