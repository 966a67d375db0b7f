"""What expert_parallel.py measures: cells, what each rank does, rows."""
