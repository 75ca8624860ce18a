"""What attacks and checks say, in the words of those who audit by arguments in Python or by settings of a job.

They name options of the command line where these tell what to state.
"""

from __future__ import annotations

import re

from eval.audit.python_words import OPTION

PHRASES: tuple[tuple[str, str], ...] = (
    (r"\. On the command line: .*", ""),
    (r"; give its file by --import \S+", ""),
    (r"; names of your own are known once imported: .*", ""),
    (r", or this file as --after FILE, --before FILE beside it", ""),
    (r", or give two files by --before and --after", ""),
    (r"(?:give|say) --method '\{name: \w+, train_mode: (\w+), \.\.\.\}'", r"state train_mode: \1 in `training`"),
    (r"pass method=FedAvg\([^)]*train_mode=(\w+)\)", r"state train_mode: \1 in `training`"),
    (r"set train_mode=(\w+) in the method", r"state train_mode: \1 in `training`"),
    (r"\(method, --method\)", "(optimizer, steps and lr in `training`)"),
    (r"say --clients N \(clients=N of hyperleak\.audit\)", "audit it by hyperleak.audit(..., clients=N)"),
    (r" \(hyperleak audit --method, fl\.federation\)", ""),
    (r", which the model then has to do: model\.register_forward_pre_hook\(.*?,\)\)", ": state its mean and std"),
    (r" \(see --help\)", ""),
    (r" \(--[a-z][a-z-]*(?: \d+)?\)", ""),
    (r"(?<![^\s(])--method '[^']*'", "`training`"),
    (r"(?<![^\s(])--method\b(?![-.])", "`training`"),
)
"""What is said by other words, in this order; what is left of options then is said by the names of the arguments."""


def in_arguments(words: str) -> str:
    """Return a sentence with options of the command line as arguments of an audit inside a federation."""
    for pattern, instead in PHRASES:
        words = re.sub(pattern, instead, words)
    return OPTION.sub(lambda found: f"`{found[1].replace('-', '_')}`", words)
