"""The machine of claims: it knows no kind of device."""
