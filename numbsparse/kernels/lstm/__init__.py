"""One step of an LSTM between its products: the gates of every unit, and their gradients.

The four gates of a unit are in neighbouring blocks: each block of B units has B values of the input
gate i, then of the forget gate f, the candidate g and the output gate o. So the four blocks of a
weight that share their inputs are neighbours, and the products read those inputs once for all.

    z = x part + recurrent part + bias                   both parts (batch, 4 * width)
    i, f, g, o = sigmoid(z_i), sigmoid(z_f), tanh(z_g), sigmoid(z_o)
    c = f * c_before + i * g * kept                      `kept`: dropout on the update
    h = o * tanh(c)

i, f, g and o take the place of the x part, where the gradient finds them. With layer norm of the
gates z = n * gain + bias, where n is the sum of both parts, normalised, and n takes that place; the
gradient computes i, f, g and o once more.

`on_gpu`, `normed` with layer norm there, and `on_cpu` have the same functions. Arrays are of one
step: (batch, 4 * width) of gates, (batch, units) of states; c and its gradient are float32 where
the rest is 16-bit.

On the CPU, `cpu_steps` runs many steps with their products at once.

On Hopper, `forward_steps` and `backward_steps` compute many steps with their products in one kernel
each: `deal` shares out the work, `producers` load the weights and rows, `steps` multiplies and adds
what several blocks of threads have of a line, `units` says which sums a thread has. `weights` makes
blocks of 32 x 32 of others, and splits float32 for products with all its bits.
"""

GATES = 4
WARPS = 4  # of a block of threads that streams a recurrent weight, that multiply
