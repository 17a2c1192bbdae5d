"""What `python -m numbsparse bench` runs: each result is checked before it is timed.

A *problem* makes operands, and knows what parts of each result must be. *Contestants* compute it,
ours and peers. `measure` checks them, and *timing* times those that are right: a row of *results*.
*Sections* say which problems meet which contestants, print their rows and keep them; `bounds`,
`changing` and `lstm` are sections that measure for themselves. `plane` and `held_out` take their
problems from all sizes, batches and densities, and `times` fits what `auto` goes by.
"""
