"""What each op's kernels get: one dataclass of tensors an op, from the public function down."""
