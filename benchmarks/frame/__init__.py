"""What every benchmark stands in: workloads, timing, results, tables."""
