r"""Exact inversion of one max-pooled convolution: what `attacks.analytic.cascade` is made of. The mathematics is here.

**Symbols.** A convolution has O filters w_o with biases b_o, and an input X of I channels, H rows and W columns. U_l is
the patch of M = I kh kw numbers that output position l sees. Pooling divides the positions into K cells of P positions
each; l(k, p) is position p of cell k. All code uses these letters for the shapes of its tensors.

**Equations.** Everything above the layer is undone already. So the pooled outputs t_ok (`target`) are known, and the
derivative s_ok of the loss with respect to each (`signal`), and the gradient G_o of each filter is in the update. With
q_okp = 1 where pooling passed on position p of cell k, and 0 elsewhere (`selection`),

    (1) outputs:   w_o . U_l(k,p) + b_o = t_ok  where q_okp = 1, and <= t_ok elsewhere,
    (2) gradient:  G_o = sum_k s_ok sum_p q_okp U_l(k,p).

Both are linear in X once q is known, and q follows from X. The search is for the two together. For one channel i of X,
(2) reads G_oi = T_o X_i with the same map T_o for all channels (`ConvPoolLayer.gradient_map`), which makes it cheap.

**Without knowing q**, q_okp stands for a probability. Weighted least squares in X, with v_o the variance of filter o's
gradient equations and u_ok that of the outputs, minimize

    (3)  sum_o |G_o - T_o X|^2 / v_o + sum_okp q_okp (w_o . U_l(k,p) + b_o - t_ok)^2 / u_ok + prior(X),

to which cells that are not decided add the spread of their patches (`normal_equations`). v_o is estimated for each
filter from what the filter leaves: filters whose positions are right become exact equations, and X and the other
filters follow from them.

**Ways to find q**, each a module of its own:

- `closed_form`: with at least as many filters as positions, the row space of G fixes X.
- `annealing`: variational expectation-maximization of (3) under a falling temperature.
- `cavity`: each filter's q from what all *other* filters say of X (expectation propagation's cavity, for a filter).
- `expectation_propagation`: for pixels; a Gaussian for each cell's "the largest of P outputs is t_ok", with a prior on
  images and the 256 levels of a pixel.

**From real numbers to levels.** A picture has pixels x = first + n step with whole numbers n (`pixel_levels`). What
equations leave open of real numbers they often fix of whole ones:

- `refinement`: hard positions, one linear solve, and the check of (1) and (2).
- `integer_decoding`: loose pixels together, as a closest-vector problem in a lattice (`lattice`).
- `joint_decoding`: levels and one changed position at once.
- `pixel_search`: all levels of the channels of one pixel. `flat_regions`: pixels of a flat area.
- `likelihood` compares what these lead to; `determined_pixels` says which pixels nothing leaves open.

`solver` puts the ways in order. `batch_separation` comes before all: it takes the sum over a batch's images apart.
"""
