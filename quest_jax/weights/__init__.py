"""Weights from files: GGUF, Hugging Face safetensors, and this library's own checkpoints."""
