"""Top-k of router logits, and the routing plan: rows sorted by expert."""
