"""Whether a change to the source changed the GPU's machine code.

Behind `python -m numbsparse machine-code`: `calls` name the products that stand for all, `gate`
compiles their kernels and compares them with the committed ones, and `cubin` reads what the
compiler made.
"""
