"""What every op stands on: problems, targets, the choice of kernels, launches; no op, no chip."""
