"""The one writer: drivers of PCI functions, the CDI and metadata files of claims, and the checkpoint. It decides
nothing: the core says what is to be, and no act begins before its intent is on disk (ADR 0009)."""
