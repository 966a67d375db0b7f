"""Grouped GEMMs of training: cells, implementations, rows."""

import harness  # noqa: F401 - finds the library
