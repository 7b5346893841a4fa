"""`gpuactors doctor`: what is wrong on this node, in groups, with what to do about each.

The facts are read once (`gather.py`, the only I/O), a check is a pure function of them (`checks/`, one file a group),
and the report is made of the findings (`report.py`). Must not change anything on the node.
"""
