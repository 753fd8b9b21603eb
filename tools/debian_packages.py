"""Print the Debian packages that this Python needs before it can make a virtual environment and compile for it."""

import importlib.util
import os
import sysconfig

if importlib.util.find_spec("ensurepip") is None:
    print("python3-venv")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):  # noqa: PTH110, PTH118  (any Python 3)
    print("python3-dev")
