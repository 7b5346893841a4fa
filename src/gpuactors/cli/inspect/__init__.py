"""`gpuactors inspect` and `gpuactors explain`: `view.py` gets the view of the node, by `own.py` where no daemon
runs; `report.py` prints it, with `claims_report.py` and `domains_report.py`."""
