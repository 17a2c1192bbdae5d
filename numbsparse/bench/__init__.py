"""What `python -m numbsparse bench` runs: each result is checked before it is timed."""
