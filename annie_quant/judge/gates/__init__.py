"""Gates, one a file: NAME, TITLE, THRESHOLD, ADVISORY, fault() and check().

`fault(answer, case, workload)` says in plain words what is wrong: "" passes, None means that the gate does not apply to
the case. `check` is the same as True, False or None. An advisory gate informs; it never decides a verdict.
"""
