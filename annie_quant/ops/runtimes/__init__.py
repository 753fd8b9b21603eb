"""Serving runtimes, one file per runtime. Each defines:

NAME
start(model, port, log, timeout_s, progress, **options) -> Server
command(model, port, **options) -> str
write(model, path, port, **options) -> Path      only if it has recipe files
"""
