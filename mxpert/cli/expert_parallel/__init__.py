"""`mxpert bench --plan` and `mxpert bench --expert-parallel N`."""
