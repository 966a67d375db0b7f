"""A whole model through Transformers: peer, rows, clocks."""

import harness  # noqa: F401 - finds the library
