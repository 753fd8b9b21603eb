"""Running models: serving runtimes and our kernels as their plug-ins, and the checks of a machine and of a running server.

serving     start a server, wait until it is ready, or print the command that starts it
doctor      what is missing on this machine, and how to fix it
"""
