"""GGUF files: written from a checkpoint, read back, with llama.cpp's names for tensors and vocabulary."""
