"""Rigs of the tests and benchmarks: compilation, interpretation, recorded launches, races."""
