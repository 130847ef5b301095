"""Side-by-side measurements, each `python -m benchmarks.<name>`."""
