"""Teachers, one a file, behind one interface: NAME, SUMMARY and open(options) → a Teacher.

    teacher.model                                        what is written into provenance
    teacher.batch(persona, category, count, seed, avoid) → Batch: rows of messages (and tools), cost, tokens

A batch that failed raises Failed (asked again, it alone), Limited (asked again after a wait) or an AnnieError, which ends
the run; what was made before is kept in any case. Teachers that are language models share _prompted.py.
"""
