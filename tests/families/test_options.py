from dataclasses import dataclass

import pytest

from sizewise.errors import ConfigError
from sizewise.families.options import acts_only


@dataclass(frozen=True)
class Options:
    pool: int = 10


@pytest.mark.parametrize(("pool", "holds"), [(10, False), (10, True), (3, True)])
def test_what_is_left_alone_or_acts_is_accepted(pool: int, holds: bool) -> None:
    acts_only(Options(pool), "pool", "method.subsets = 'pool'", holds)


def test_what_was_set_and_does_not_act_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^method\.pool acts with method\.subsets = 'pool' only; set that, or leave "
        r"method\.pool out$",
    ):
        acts_only(Options(3), "pool", "method.subsets = 'pool'", False)
