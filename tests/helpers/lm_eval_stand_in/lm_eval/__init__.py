"""The parts of lm-eval 0.4.13 that annie-quant's adapter uses, for tests where lm-eval is not installed (it brings 30 packages).

Only names and calls are those of lm-eval; tests/offline/test_harness.py uses the real package where it is installed.
"""
