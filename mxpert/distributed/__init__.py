"""Expert parallelism: one MoE layer over several GPUs, on torch.distributed."""
