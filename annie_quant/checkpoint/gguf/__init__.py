"""Write a checkpoint as a GGUF file, and read one, with llama.cpp's names and vocabulary."""
