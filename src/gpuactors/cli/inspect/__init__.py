"""`gpuactors inspect` and `gpuactors explain`: `view.py` gets the view of the node, `report.py` prints it, with
`claims_report.py` and `domains_report.py`."""
