"""Measuring: synthetic workloads, the engine's throughput on them, and what a number of repeats says."""
