"""Decoders as pure functions over a dict of weights; they know nothing of caches or sparsity."""
