"""The vocabulary of the core: frozen values, and what follows from a value alone."""
