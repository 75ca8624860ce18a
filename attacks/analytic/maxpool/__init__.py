"""Exact inversion of one convolution at a time: what `attacks.analytic.cascade` is made of.

`separate` tells the images of a batch apart, `layer` holds a convolution with its pooling as linear maps, `equations`
what is known of one, `rowspace`, `annealing`, `cavity` and `propagation` four ways to find where the pooling looked,
`confirmed` which pixels are certain on the way and `part` what is left of the algebra without them, `polish` the last
step to rounding and the check, `fixed` which pixels of the result are certain. `positive` is the linear algebra of
large matrices.
"""
