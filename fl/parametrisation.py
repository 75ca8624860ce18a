"""The former name of `fl.parametrization`."""

import warnings

from fl.parametrization import Generated as Generated
from fl.parametrization import Parametrization as Parametrisation
from fl.parametrization import parametrizations as parametrisations

__all__ = ["Generated", "Parametrisation", "parametrisations"]

warnings.warn("fl.parametrisation is now fl.parametrization; import that", DeprecationWarning, stacklevel=2)
