"""The command `gpuactors replay`: a journal's events, fed to the same core that saw them first.

Imported only by the command line.
"""
