"""`gpuactors bundle`: one archive with what a report of a fault needs, from a pod that has neither tar nor cat.

`parts.py` names what is in it, each part made by the function of the command that shows it; `archive.py` writes them.
Must not write to the node, nor read a credential or a variable by itself.
"""
