"""The passes: every edit of a graph, what it restores, and the order in which they run.

A pass is a record that names its function; the module of the function is imported only when the graph has work for it.
`run` is the only caller of passes. It keeps each version of a graph (`Graph.version`), so that studies of one file
share the passes that their requests have in common, and writes down what each pass changed (`Graph.edits`).

The shape is that of onnx/ir-py's `PassManager` (src/onnx_ir/passes/_pass_infra.py) and of sqlglot's optimizer, whose
`RULES` are one tuple (sqlglot/optimizer/optimizer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from operator import is_not
from typing import TYPE_CHECKING, Any

from staticmem.ir.graph import Edit, Graph, Note, Parameter
from staticmem.ir.record import record

if TYPE_CHECKING:
    from staticmem.scenario.step import Scenario

Function = Callable[[Graph, Any], tuple[Graph, Sequence[Note]]]


@record(frozen=True, slots=True)
class Pass:
    """One edit of a graph.

    Attributes:
        name: what the edit is called in reports.
        restores: what it puts back or takes away, and why.
        source: the file and project that say so.
        function: `module:function` in `staticmem.passes`. It takes the graph and the context of the run and returns
            the edited graph (the same object where nothing changed) with the notes to add.
        bases: the op bases of which the graph needs at least one; empty where any graph may have work.
        option: the field of the context that turns the pass on, unless it is False or None, and that its result depends
            on; empty: the pass always runs.
        ensures: what later passes and stages may rely on.
    """

    name: str
    restores: str
    source: str
    function: str
    bases: frozenset[str] = frozenset()
    option: str = ""
    ensures: str = ""

    def has_work(self, graph: Graph, context: object) -> bool:
        """Whether the context asks for the edit and the graph has an op that it is about."""
        if self.option and getattr(context, self.option) in (False, None):
            return False
        return not self.bases or not self.bases.isdisjoint(graph.bases)

    def edit(self, graph: Graph, context: object) -> Graph:
        """The edited graph, with its notes and the record of the edit."""
        module, _, name = self.function.partition(":")
        function: Function = getattr(import_module(f"staticmem.passes.{module}"), name)
        changed, notes = function(graph, context)
        if changed is graph and not notes:
            return graph
        before, after = graph.ops, changed.ops
        if len(before) == len(after):
            new = sum(map(is_not, before, after))
        else:
            new = len({*map(id, after)}.difference(map(id, before)))
        return changed.with_edit(Edit(self.name, len(before), len(after), new, tuple(notes)))


@record(frozen=True, slots=True)
class Asked:
    """What a request says that passes depend on."""

    training: bool = False
    inplace: str = "none"  # a policy of `inplace.POLICIES`
    unfold_batchnorm: bool = False
    freeze: str | None = None  # the pattern, in training only
    parameters: tuple[Parameter, ...] = ()  # in the order of `Module.named_parameters()`


IN_PLACE = (
    Pass(
        "in place",
        "activations and residual adds that ran in place: exports to ONNX make every op out of place",
        "the sources of torchvision, timm and transformers, and the source lines in the file",
        "inplace:run_in_place", option="inplace",
        ensures="a target that ends with an underscore writes into its first argument",
    ),
)  # fmt: skip

STEP = (
    *IN_PLACE,
    Pass(
        "unfolded batch norms",
        "batch norms that an export in inference mode folded into convolutions",
        "torch/nn/utils/fusion.py, fuse_conv_bn_eval",
        "add_norms:unfold_batch_norms", frozenset(("aten::conv1d", "aten::conv2d", "aten::conv3d")), "unfold_batchnorm",
    ),
    Pass(
        "batch norms in training",
        "the training form of batch norms that were exported in eval mode",
        "torch/nn/modules/module.py, Module.train",
        "export_only:train_batch_norm", frozenset(("aten::batch_norm",)), "training",
    ),
    Pass(
        "custom functions",
        "nothing: it names custom autograd functions, of whose backward the file says nothing",
        "torch/autograd/function.py, Function.apply",
        "export_only:name_custom_functions", option="training",
    ),
    Pass(
        "tied parameters",
        "one storage under several names, of which exports keep one",
        "transformers/modeling_utils.py, tie_weights",
        "export_only:tie_parameters",
        ensures="a parameter comes after the one whose storage it shares",
    ),
    Pass(
        "attention masks",
        "attention without masks, or with is_causal: transformers builds masks only while it exports",
        "transformers/masking_utils.py, _ignore_causal_mask_sdpa",
        "export_only:drop_masks", frozenset(("aten::scaled_dot_product_attention", "aten::where")),
    ),
    Pass(
        "noise of stochastic depth",
        "the dtype of the noise, which is that of the tensor it multiplies: an export has resolved it",
        "torchvision/ops/stochastic_depth.py",
        "noise:follow_operand", frozenset(("aten::empty",)),
    ),
    Pass(
        "trained parameters",
        "requires_grad of a file that was exported for inference, in which no parameter has it",
        "torch/nn/modules/module.py, Module.requires_grad_",
        "freezing:thaw", option="training",
    ),
    Pass(
        "frozen parameters",
        "requires_grad False of the parameters whose names match --freeze",
        "torch/nn/modules/module.py, Module.named_parameters",
        "freezing:freeze", option="freeze",
    ),
)  # fmt: skip
"""Passes that depend on what the step is asked to do."""


def run(passes: Iterable[Pass], graph: Graph, context: object) -> Graph:
    """The graph after all passes that have work, in order. Versions are kept with the graph that they were made of."""
    for each in passes:
        if each.has_work(graph, context):
            key = f"{each.name}: {getattr(context, each.option)}" if each.option else each.name
            graph = graph.version(key, partial(each.edit, context=context))
    return graph


def edit_lines(graph: Graph) -> list[str]:
    """What each pass did, as lines of text."""
    lines = []
    for edit in graph.edits:
        ops = f"{edit.before:,} ops" + (f" -> {edit.after:,}" if edit.after != edit.before else "")
        lines.append(f"pass '{edit.name}': {ops}, {edit.changed:,} of them new or changed")
        lines += [f"  {note.text} [{note.code}] x{note.count:,}" for note in edit.notes]
    return lines


def for_step(
    graph: Graph,
    scenario: Scenario,
    inplace: str = "none",
    unfold_batchnorm: bool = False,
    passes: Iterable[Pass] = STEP,
) -> Graph:
    """The graph that a step of the scenario runs. `inplace` is the policy for activations where the file does not say
    what ran in place."""
    training = scenario.training
    freeze = scenario.freeze if training else None
    return run(passes, graph, Asked(training, inplace, unfold_batchnorm, freeze, graph.parameters))


COUNTED_AGAIN = ("batch norms in training", "custom functions", "tied parameters", "attention masks")

__all__ = ["COUNTED_AGAIN", "STEP", "Asked", "Pass", "edit_lines", "for_step", "run"]
