"""What `python -m numbsparse bench` runs: each result is checked before it is timed.

A *problem* makes operands, and knows what parts of each result must be. *Contestants* compute it,
ours and the *peers*. `measure` checks them, and *timing* times those that are right: a row of
results. A *section* says which problems meet which contestants; `run` prints its rows as `show`
says them, and keeps them in files of *results*. `plane` and `times` take their problems from all
sizes, batches and densities.
"""
