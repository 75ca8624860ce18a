"""The former name of `fl.local.weight_decay`."""

import warnings

from fl.local.weight_decay import *  # noqa: F403

warnings.warn("fl.decay is now fl.local.weight_decay; import that", DeprecationWarning, stacklevel=2)
