"""The two stages of an MoE layer on Hopper."""
