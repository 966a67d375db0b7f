"""The public ops, their checks and their registration with torch.library."""
