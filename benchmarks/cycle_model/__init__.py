"""What `gfx950_model.py` models: AMD's published ladder, and our kernels on reference shapes."""
