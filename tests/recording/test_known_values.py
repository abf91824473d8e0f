"""Code that reads values of its inputs: what it reads is known, and the recording says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from staticmem.errors import DimensionError, ModelFileError
from staticmem.frontends.architectures import architecture_of
from staticmem.frontends.recorded import RecordedModel
from staticmem.recording import image_inputs
from staticmem.recording.architectures import BuiltModel
from staticmem.studies import Request, Study

torch = pytest.importorskip("torch")

Contents = dict[str, Callable[[tuple[int, ...]], Any]]
GRID = [[2, 3], [1, 4]]
GRIDS: Contents = {"grid": lambda shape: torch.tensor(GRID)}


class _Grids(torch.nn.Module):  # type: ignore[misc, name-defined]
    """As vision parts: patches of images of several sizes, in one tensor, with the grid of each."""

    def __init__(self, read: bool = True) -> None:
        super().__init__()
        self.layer, self.read = torch.nn.Linear(64, 64), read

    def forward(self, x: Any, grid: Any) -> Any:
        parts = [10, 4]
        if self.read:
            lengths = grid.prod(-1)
            lengths[0] += 4
            parts = lengths.tolist()
            assert torch.tensor([lengths[0], 7], device=x.device).tolist() == [parts[0], 7]
        return torch.cat([self.layer(part) * i for i, part in enumerate(x.split(parts), 1)])


def document(module: Any, contents: Contents | None = GRIDS, **inputs: Any) -> dict[str, Any]:
    from staticmem.recording.record import record

    axes = [dict.fromkeys((0,), "seq") if name == "ids" else {} for name in inputs]
    return record(module, (), inputs, axes=axes, input_values=contents)


def images(rows: int = 14) -> dict[str, Any]:
    return {"x": torch.zeros(rows, 64), "grid": torch.zeros(2, 2, dtype=torch.int64)}


def test_the_recording_follows_what_is_known() -> None:
    read, fixed = document(_Grids(), **images()), document(_Grids(read=False), **images())
    assert all("test_known_values.py:" in place for place in read["read_values"])
    assert "read_values" not in fixed
    for request in (Request(mode="infer"), Request(optimizer="adamw")):
        reports = [Study(RecordedModel("<m>", one, "transformers"), request).report for one in (read, fixed)]
        activations = [dict(report.peak.by_category).get("activation", 0) for report in reports]
        assert activations[0] - activations[1] in (0, 512)  # the lengths, which have a name until the forward ends
    (note,) = [n for n in RecordedModel("<m>", read, "transformers").notes if n.code == "SM392"]
    assert "reads values of its inputs" in note.text


def test_what_is_not_known_cannot_be_read() -> None:
    with pytest.raises(ModelFileError, match="cannot be recorded"):
        document(_Grids(), None, **images())

    class Writes(_Grids):
        def forward(self, x: Any, grid: Any) -> Any:
            grid = grid.clone()
            grid[:, 0] = x[:2, 0].long()  # nobody knows these
            return super().forward(x, grid)

    with pytest.raises(ModelFileError, match="cannot be recorded"):
        document(Writes(), **images())


def test_sizes_that_contents_decide() -> None:
    class Found(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, grid: Any) -> Any:
            rows = torch.repeat_interleave(torch.ones_like(grid[:, 0]), grid.prod(-1))
            return x[: rows.shape[0]] * 2, (grid > 1).nonzero()

    written = document(Found(), **images())
    shapes = written["programs"][0]["output_shapes"]
    assert shapes == [[10, 64], [3, 2]]


def test_a_value_that_depends_on_an_open_size_holds_at_the_example() -> None:
    class Padded(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, ids: Any) -> Any:
            return torch.zeros(int((ids == 0).sum()), 8, device=ids.device) + 1

    ids = torch.zeros(16, dtype=torch.int64)
    written = document(Padded(), {"ids": lambda shape: torch.zeros(shape, dtype=torch.int64)}, ids=ids)
    model = RecordedModel("<m>", written, "transformers")
    assert "Eq(seq,16)" in model.sizes.conditions
    assert Study(model, Request(mode="infer", dims={"seq": 16})).report.peak.live_bytes > 0
    with pytest.raises(DimensionError, match="another way"):
        _ = Study(model, Request(mode="infer", dims={"seq": 17})).report


def test_a_value_that_depends_on_the_batch_holds_at_the_batch_recorded() -> None:
    """An example of 1 is recorded as 2: what is read of 2 samples is no program for one."""
    from staticmem.recording.record import record

    class Counted(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, ids: Any) -> Any:
            return torch.zeros(int((ids == 0).sum()), 256, device=ids.device) + 1

    ids, axes = torch.zeros(1, 16, dtype=torch.int64), [{0: "batch"}]
    given: Contents = {"ids": lambda shape: torch.zeros(shape, dtype=torch.int64)}
    written = record(Counted(), (), {"ids": ids}, axes=axes, input_values=given)
    assert written["programs"][0]["output_shapes"] == [[32, 256]]
    assert written["sizes"]["conditions"] == ["Eq(batch,2)"]
    written = record(Counted(), (), {"ids": ids}, axes=axes, input_values=given, as_given=True)
    assert written["programs"][0]["output_shapes"] == [[16, 256]]
    assert RecordedModel("<m>", written, "transformers").sizes.conditions == ()


def test_a_size_that_the_code_fixed_is_recorded_again() -> None:
    """A model that is built on demand is asked by the name of the size, or by its place."""

    class Loop(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, ids: Any) -> Any:
            return sum(ids[i].float() for i in range(len(ids)))

    written = document(Loop(), {}, ids=torch.zeros(3, dtype=torch.int64))
    assert written["fixed_axes"] == {"ids[0]": "seq"}
    model = BuiltModel.__new__(BuiltModel)
    RecordedModel.__init__(model, "<m>", written, "transformers")
    architecture = architecture_of("timm:resnet18")
    vars(model).update(others=[], by_step={}, described=None, architecture=architecture)
    assert model.at({"seq": 3}, False, {}) is model
    assert not model.holds({"seq": 4}, False)


class _Config:
    model_type = "parts"

    def __init__(self, **names: Any) -> None:
        vars(self).update(names)

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


class _Vision(torch.nn.Module):  # type: ignore[misc, name-defined]
    """What the vision part of a model of transformers makes of images."""

    def __init__(self, tiles: int = 0) -> None:
        super().__init__()
        self.tiles = tiles

    def get_image_features(self, pixel_values: Any, image_sizes: Any = None) -> Any:
        if self.tiles:
            assert image_sizes is not None
            assert pixel_values.shape[1] == self.tiles
        count = pixel_values.shape[0] * max(self.tiles, 1)
        return _Config(pooler_output=list(torch.empty(count, (pixel_values.shape[-1] // 14) ** 2, 8)))


def test_tokens_that_stand_for_images() -> None:
    vision = _Config(image_size=28, num_channels=3)
    config = _Config(image_token_id=9, vision_config=vision)
    for tiles, taken, shape in ((0, {}, (4, 3, 28, 28)), (5, {"image_sizes": 0}, (4, 5, 3, 28, 28))):
        made = image_inputs.Images(_Vision(tiles), config, batch=2, each=2, side=None)
        made.add_pixels(taken, torch.float16)
        assert made.inputs["pixel_values"] == (torch.float16, shape)
        assert made.tokens() == 2 * 4 * max(tiles, 1)
    ids = made.ids(3)((2, 6))
    assert ids.tolist() == [[0, 9, 9, 9, 0, 0]] * 2
    assert made.kinds(3)((2, 6)).tolist() == [[0, 1, 1, 1, 0, 0]] * 2
    assert made.named_kinds({"token_type_ids": 0}) == ["token_type_ids"]


def test_patches_with_their_grid() -> None:
    vision = _Config(patch_size=14, temporal_patch_size=2, spatial_merge_size=2, in_channels=3)
    made = image_inputs.Images(
        torch.nn.Module(), _Config(image_token_id=9, vision_config=vision), batch=2, each=1, side=100
    )
    made.add_pixels({"image_grid_thw": 0}, torch.float32)
    assert made.inputs["pixel_values"] == (torch.float32, (2 * 36, 3 * 2 * 14 * 14))
    assert made.contents["image_grid_thw"]((2, 3)).tolist() == [[1, 6, 6]] * 2
    assert made.tokens() == 9


def test_images_without_tokens() -> None:
    """As CLIP, whose text has none."""
    made = image_inputs.Images(torch.nn.Module(), _Config(vision_config=_Config(image_size={"height": 32})), 2, 1, None)
    made.add_pixels({}, torch.float32)
    assert made.inputs["pixel_values"][1] == (2, 3, 32, 32)
    assert made.tokens() == 0
