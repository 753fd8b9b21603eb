"""Publish a checkpoint: the model card and the upload to the Hugging Face Hub."""
