"""Command lines over the library `lim`; `python -m experiments.NAME --help` teaches each."""
