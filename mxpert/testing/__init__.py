"""Support for tests, benchmarks and the CLI.

`numerics` has comparators and derived tolerances, `noise` expected quantisation noise. `problems`
makes MoE layers and batches. `validate` checks data on the host. `timing` measures. Import the
module that you need.
"""
