"""Teachers: one module each, with NAME, SUMMARY and open_teacher(options, split) → Teacher.

    teacher.model                                        recorded in provenance
    teacher.batch(persona, category, count, seed, avoid) → Batch: rows of messages (and tools), cost, tokens

A failed batch raises BatchFailed (only it is repeated), RateLimited (repeated after a wait) or an AnnieError, which ends the
run; earlier batches are kept in each case. Teachers that are language models share _prompted.py.
"""
