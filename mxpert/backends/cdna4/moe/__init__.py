"""MoE layer on gfx950: both GEMM stages for few rows (decode) and for many (prefill)."""
