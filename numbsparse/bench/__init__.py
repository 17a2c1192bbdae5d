"""What `python -m numbsparse bench` runs: each result is checked before it is timed.

A *problem* makes operands, and knows what parts of each result must be. *Contestants* compute it,
ours and the *peers*. `measure` checks them, and *timing* times those that are right: a row of
results. A *section* says which problems meet which contestants; `run` prints its rows and keeps
them as JSON, `results` reads what is committed, and `show`, `tables`, `figure`, `ladder` and
`lessons` make text and pictures of it. The same problems and contestants are what `profile` has
read, `machine_code` has compiled, and what `reads` has a formula for.
"""
