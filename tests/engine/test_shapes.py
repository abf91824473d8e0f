"""What a run of the forward knows of every value. Parameters and inputs stay, whatever is done with views of them."""

from __future__ import annotations

from small_graphs import Builder

from staticmem.engine.shapes import ValueInfo, value_infos
from staticmem.ir import dtypes
from staticmem.ir.graph import Ref


def test_values_and_their_storages() -> None:
    """The first view is gone when the second is made: their storage is not, for the model has it."""
    b = Builder(x=(2, 6))
    w = b.parameter("w", 3, 4)
    for of, shape in ((b.inputs[0].name, (3, 4)), (w.name, (12,))):
        for again in ("a", "b"):
            b.call("relu", b.call("view", Ref(of), shape, name=f"{of}.{again}"), name=f"{of}.{again}.relu")
    found = value_infos(b.graph(), training=True)
    for of, shape in (("x", (3, 4)), ("w", (12,))):
        storage = found[of].storage
        assert found[of].fresh
        for again in ("a", "b"):
            assert found[f"{of}.{again}"] == ValueInfo(shape, dtypes.float32, storage, False, 48)
            assert found[f"{of}.{again}.relu"].fresh
    assert len({known.storage for known in found.values()}) == 6
