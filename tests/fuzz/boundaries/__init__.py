"""Grammar-based fuzzing of everything that another party writes, one module per boundary. See harness.py."""
