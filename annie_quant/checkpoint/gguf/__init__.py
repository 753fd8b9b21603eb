"""GGUF files: write one from a checkpoint and read it back, with llama.cpp's names of tensors and its vocabulary."""
