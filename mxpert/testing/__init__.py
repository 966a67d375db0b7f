"""Support for tests, benchmarks and the CLI.

`numerics` has comparators and derived tolerances. `problems` and `exact` make MoE layers and
batches. `poison` plants errors and surrounds tensors with NaN. `validate` checks data on the host.
`timing` measures. Import the module that you need.
"""
