"""The puzzles, solved; `course` cuts out what is to be written."""
