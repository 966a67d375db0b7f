"""Tests, in the tree of the package; support/ holds what they share with benchmarks."""
