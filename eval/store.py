"""Rows in JSON Lines files: the public names of `eval.io.jsonl`."""

from eval.io.jsonl import (
    locked,
    parse,
    read_json,
    read_rows,
    replace_rows,
    write_rows,
    write_text,
)

__all__ = [
    "locked",
    "parse",
    "read_json",
    "read_rows",
    "replace_rows",
    "write_rows",
    "write_text",
]
