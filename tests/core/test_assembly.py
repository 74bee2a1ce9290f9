from types import SimpleNamespace

import pytest
from tests.support.context import make_context

from trainforge.assembly import _total_steps


@pytest.mark.parametrize(
    ("epochs", "per_epoch", "steps"), [(1.1, 10, 11), (3, 7, 21), (0.5, 5, 3), (0.001, 10, 1)]
)
def test_steps_of_fractional_epochs(epochs, per_epoch, steps):
    data = SimpleNamespace(steps_per_epoch=per_epoch)
    assert _total_steps(make_context(built={"data": data}, steps=None, epochs=epochs)) == steps
