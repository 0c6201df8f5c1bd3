"""The tasks of ``quest-jax eval``: questions about long contexts, one file a family. No array, no model."""
