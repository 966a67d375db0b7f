"""The `mxpert` command."""
