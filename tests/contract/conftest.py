"""What tests of the contract share: attacks keep to it however long their searches are."""

from collections.abc import Iterator

import pytest
from support.brief import brief_picture_searches, few_imitated_clients


@pytest.fixture(scope="module", autouse=True)
def _brief_searches() -> Iterator[None]:
    with brief_picture_searches(), few_imitated_clients():
        yield
