"""One file a strategy: NAME, SUMMARY, quantize(job, report)."""
