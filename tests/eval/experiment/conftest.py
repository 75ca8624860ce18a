"""Few candidates, and one chart of a kind: what is computed and drawn has tests of its own."""

from collections.abc import Iterator

import pytest
from support.brief import few_candidates, one_chart_of_a_kind


@pytest.fixture(scope="module", autouse=True)
def _brief() -> Iterator[None]:
    with few_candidates(), one_chart_of_a_kind():
        yield
