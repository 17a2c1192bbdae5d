"""Kernels to be written, from one thread a value to the block-sparse product.

`python -m numbsparse puzzle` lists them. Each is a file in `levels`, whole, of which a learner gets
the part above the checker's, without the lines between `# your code` and `# end`.
"""
