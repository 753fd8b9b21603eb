"""Serving runtimes, one to a file: NAME, `start(model, port, log, timeout_s, …) -> Server`, `command(model, port)`."""
