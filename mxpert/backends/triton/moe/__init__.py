"""The two stages of an MoE layer, portable."""
