"""The former name of `eval.privacy.canaries`."""

import warnings

from eval.privacy.canaries import *  # noqa: F403

warnings.warn("eval.canaries is now eval.privacy.canaries; import that", DeprecationWarning, stacklevel=2)
