"""What backends share of an MoE stage: epilogues, kernels that finish split-K, the host's flow."""
