"""Gates, one a file: NAME, TITLE, THRESHOLD, ADVISORY and fault().

`fault(answer, case, workload)` says in plain words what is wrong: "" passes, None means that the gate does not apply to
the case. An advisory gate informs; it never decides a verdict.
"""
