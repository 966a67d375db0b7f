"""Routing: top-k choice of experts, and the plan that sorts tokens by expert."""
