"""MoE layers: cells, implementations, rows, figures."""

import harness  # noqa: F401 - finds the library
