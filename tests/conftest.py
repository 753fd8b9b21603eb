"""For every test: OpenMP threads that sleep when idle, as the command line has them, before torch is loaded."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
