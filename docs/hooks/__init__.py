"""What the site is built with: pages written from the code, tutorials that are run, hooks of mkdocs."""

SUMMARIES = frozenset({"index.md", "hyperfl.md", "searches.md", "exact-inversion.md", "papers.md", "commands.md"})
"""Pages of docs/results that people write; the others are reports of single runs."""
