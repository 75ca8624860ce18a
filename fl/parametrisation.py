"""The former name of `fl.parametrization`."""

import warnings

from fl.parametrization import *  # noqa: F403

warnings.warn("fl.parametrisation is now fl.parametrization; import that", DeprecationWarning, stacklevel=2)
