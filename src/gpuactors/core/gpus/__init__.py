"""The claims of GPUs: what the machine of claims asks of this kind of device."""
