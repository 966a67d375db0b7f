"""What tests, benchmarks and the CLI share: comparators, problems, poison, validation, timing.

`numerics` compares and derives tolerances; `problems` and `exact` make layers; `poison` makes them
wrong or dangerous; `validate` looks at data. Import the module that you need.
"""
