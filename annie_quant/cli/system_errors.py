"""Messages for exceptions that a full disk, too little memory or file permissions cause anywhere in a command."""

from __future__ import annotations

import errno
import resource

from annie_quant import files

# errno values, and texts that libraries use in exceptions of their own types.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), ("No space left on device",)
MEMORY = (errno.ENOMEM,), ("allocate memory", "out of memory", "bad_alloc", "start new thread", "failed to map segment")


def describe(error: Exception) -> tuple[str, str] | None:
    """Return (message, hint) for an error of the system: disk, memory, permissions. None for any other error."""
    if _is_caused_by(error, *DISK_FULL):
        return "the disk is full; finished work is saved", "free some space, then run the same command again"
    # Under ulimit -v libraries cannot be loaded either. oneDNN's message does not mention memory.
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    not_loaded = limited and (
        isinstance(error, (ImportError, SystemError)) or _is_caused_by(error, (), ("could not create a primitive",))
    )
    if isinstance(error, MemoryError) or not_loaded or _is_caused_by(error, *MEMORY):
        return (
            "there is not enough memory; finished work is saved",
            "stop other programs, or raise ulimit -v, and run the same command again",
        )
    if isinstance(error, EOFError):  # Python 3.11 and earlier keep a compiled module that a full disk has cut
        return (
            f"a file ends too early ({error}); finished work is saved",
            "free some space, delete the package's __pycache__ folders, and run the same command again",
        )
    if isinstance(error, RecursionError):
        return "a file or an answer is nested too deeply", "restore the file; set ANNIE_QUANT_TRACEBACK=1 for the place"
    if not isinstance(error, OSError):
        return None
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename:
        message = f"{where}{error.strerror}{files.owner(error.filename)}"
        return message, "choose another --output, or fix the permissions"
    return f"{where}{error.strerror or error}", "set ANNIE_QUANT_TRACEBACK=1 for the traceback"


def _is_caused_by(error: BaseException | None, numbers: tuple[int, ...], texts: tuple[str, ...]) -> bool:
    """Whether the error, or one in its chain of causes, has one of these errno values or texts."""
    while error is not None:
        if getattr(error, "errno", None) in numbers or any(text in str(error) for text in texts):
            return True
        error = error.__cause__ or error.__context__
    return False
