"""Words from files reach terminal, Markdown and HTML as words."""

from __future__ import annotations

import io
import json
import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from eval.commands import terminal
from eval.io.sanitize import LONGEST_MESSAGE, escape_controls, escape_markdown, shorten
from eval.report import render_html
from eval.report.blocks import Paragraph, Report, Section
from eval.report.render_markdown import render_markdown
from eval.report.results_table import Table, to_markdown

HOSTILE = (
    "\x1b]0;owned\x07\x1b[31m\r\x9b2J\u202ereversed\u2066 [link=https://evil.test]x[/link] [paper] [/b] :smile: \ud800"
)


def shown_on(screen_is_terminal: bool, show) -> str:
    file = io.StringIO()
    screen = Console(file=file, force_terminal=screen_is_terminal, width=400, emoji=False, no_color=True)
    show(screen)
    return file.getvalue()


@given(st.text())
@example(HOSTILE)
def test_nothing_invisible_is_left(words):
    found = escape_controls(words)
    assert found.isascii() or not any(character in found for character in "\x9b\u202e\u2066\u2028\ud800\ufeff")
    assert not any(ord(character) < 32 for character in found)
    assert found.encode().decode() == found


def test_what_people_write_stays():
    words = "Grüße ≥ 20 dB, 日本語, emoji 👩\u200d🔬, [17.9, 20.0] 10⁻⁷"
    assert escape_controls(words) == words


def test_the_middle_of_a_long_message_is_left_out():
    found = shorten("wrong: " + "x" * 10**6 + "; do this")
    assert found.startswith("wrong: ")
    assert found.endswith("; do this")
    assert len(found) < LONGEST_MESSAGE + 100


@pytest.mark.parametrize("words", ["[link=https://evil.test]x[/link]", "[paper]", "[/b]", ":smile:", "[red]"])
@pytest.mark.parametrize("screen_is_terminal", [True, False])
def test_nothing_is_markup_for_the_terminal(words, screen_is_terminal):
    found = Table(words, ("method", "flags"), [(words, words)], [(words, "-")], [words])

    def show(screen: Console) -> None:
        terminal.show_table(screen, found)
        terminal.print_line(screen, words)
        with terminal.show_progress(screen) as told:
            told.stage(words, 0, 1)
        with terminal.show_warnings(screen):
            logging.getLogger("eval").warning(words)

    printed = shown_on(screen_is_terminal, show)
    assert printed.count(words) >= 7
    assert "\x1b]8" not in printed


@pytest.mark.parametrize("screen_is_terminal", [True, False])
def test_no_escape_reaches_the_terminal(screen_is_terminal):
    found = Table(HOSTILE, ("method", "flags"), [(HOSTILE, "-")], [], [HOSTILE])
    printed = shown_on(screen_is_terminal, lambda screen: terminal.show_table(screen, found))
    assert "\x1b]" not in printed
    assert "\x1b[31m" not in printed
    assert not set(printed) & set("\r\x9b\u202e\u2066\ud800\x07")
    assert "\\x1b]0;owned" in printed.replace("\n", "")


def test_errors_and_json_are_plain_text(capsys):
    terminal.print_message(HOSTILE)
    terminal.print_output(HOSTILE)
    terminal.print_json({"title": HOSTILE})
    told = capsys.readouterr()
    assert not set(told.out + told.err) & set("\r\x1b\x9b\u202e\u2066\ud800\x07")
    assert json.loads(told.out.partition("\n")[2]) == {"title": HOSTILE}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("a|b\\", "a\\|b\\\\"),
        ("![x](u) [y](u)", "\\![x]\\(u) [y]\\(u)"),
        ("[x]: https://e.test", "[x]\\: https\\://e.test"),
        ("<script>&lt;", "\\<script>\\&lt;"),
        ("two\nlines", "two lines"),
        ("# title", "\\# title"),
        ("1. item", "1\\. item"),
        ("*a* _b_ `c`", "\\*a\\* \\_b\\_ \\`c\\`"),
        ("fed_avg 19.1 [17.9, 20.0] ig@tv=1e-3 -", "fed_avg 19.1 [17.9, 20.0] ig@tv=1e-3 -"),
    ],
)
def test_nothing_is_markup_in_markdown(words, shown):
    assert escape_markdown(words) == shown


def test_tables_in_markdown_keep_their_cells():
    text = to_markdown(Table("<b>|\n# x", ("method",), [("a|b\nc",)], [], ["[x](javascript:1)"]))
    assert text.splitlines()[0] == "# \\<b>\\| # x"
    assert "| a\\|b c |" in text.splitlines()
    assert "- [x]\\(javascript:1)" in text


def test_reports_show_control_characters():
    report = Report(HOSTILE, HOSTILE, [], [Section("a", HOSTILE, [Paragraph(HOSTILE)])])
    for text in (render_html.render_html(report), render_markdown(report)[0]):
        assert not set(text) & set("\r\x1b\x9b\u202e\u2066\ud800\x07")
        assert "owned" in text
