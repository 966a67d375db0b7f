"""Rowwise and columnwise MX copies of a tensor from one read, portable."""
