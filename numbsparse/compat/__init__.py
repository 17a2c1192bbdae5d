"""Classes of other libraries, under their own names, on the kernels of this one."""
