"""Generation: the sizes at which a decoder is bound, and the graph of `generate` over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from staticmem.errors import DimensionError
from staticmem.ir.graph import Graph
from staticmem.ir.model_file import Binding, ModelFile, describe_inputs, resolve
from staticmem.passes import pipeline
from staticmem.passes.requested.generation.program import generated
from staticmem.scenario.generation import Generation
from staticmem.scenario.request import Request
from staticmem.studies.position_tables import check_positions

WIDE = 1 << 22  # tokens: beyond the window of any attention


def binding_at(model: ModelFile, request: Request, dims: Mapping[str, int], tokens: int) -> Binding:
    """The sizes of a decoder with `tokens` tokens.

    Raises:
        DimensionError: the file fixed the number of tokens, or has no token ids.
    """
    first = model.inputs[0] if model.inputs else None
    if first is None or first.dtype.is_floating_point or len(first.shape or ()) != 2:
        raise DimensionError(
            "generation needs a decoder with token ids",
            f"Its first input is to be integers [batch, tokens]; the inputs are {describe_inputs(model)}.",
            "Export the decoder with input_ids alone (docs/generation.md).",
            code="SM125",
        )
    assert first.shape is not None
    length = first.shape[1]
    if isinstance(length, int):
        raise DimensionError(
            f"the export fixed the number of tokens to {length:,}",
            "A prompt and a decode step have different ones.",
            "Export again with that dimension open: staticmem export does, torch.export takes dynamic_shapes.",
            code="SM125",
        )
    return resolve(
        _ModelAtOne(model), batch=request.batch, resolution=request.image_size, dims={**dims, length: tokens}
    )


class _ModelAtOne(ModelFile):
    """A model whose batch and tokens may be 1, whatever it was exported with: exporters take 1 for a size of its own,
    and what the code of decoders does otherwise at it is in the masks, which `generate` makes itself."""

    def __init__(self, model: ModelFile) -> None:
        self.path, self.format, self.producer, self.inputs = model.path, model.format, model.producer, model.inputs
        self.graphs, self.fixed_axes = model.graphs, model.fixed_axes
        special = {f"{relation}({name},1)" for name in model.symbols for relation in ("Ne", "Gt")}
        conditions = tuple(text for text in model.sizes.conditions if text not in special)
        self.sizes = replace(model.sizes, conditions=conditions)
        self.symbols = {
            name: replace(bounds, low=1) if bounds.low == 2 else bounds for name, bounds in model.symbols.items()
        }


def at_length(model: ModelFile, binding: Binding, tokens: int) -> Binding:
    """The binding with another number of tokens. Bounds of the export do not count: that a decode step has one token
    is what `generate` does, and the graph of the prompt has the sizes of it."""
    assert model.inputs[0].shape is not None
    length = model.inputs[0].shape[1]
    shapes = {
        spec.name: tuple(
            tokens if dim == length else size
            for dim, size in zip(spec.shape or (), binding.shapes[spec.name], strict=True)
        )
        for spec in model.inputs
    }
    return replace(binding, symbols={**binding.symbols, str(length): tokens}, shapes=shapes)


def generated_graph(model: ModelFile, binding: Binding, asked: Generation, passes: Callable[[Graph], Graph]) -> Graph:
    """The graph of `generate`; `binding` has the prompt."""
    prefill, decode, wide = (
        passes(pipeline.bind(model, at_length(model, binding, tokens))) for tokens in (asked.prompt, 1, WIDE)
    )
    check_positions(prefill, asked.steps)
    return generated(prefill, decode, wide, asked)
