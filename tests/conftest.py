"""One thread per process: on a shared two-core machine two OpenMP threads are many times slower than one."""

import torch

torch.set_num_threads(1)
