"""The passes: every edit of a graph, what it restores, and the order in which they run.

A pass is a record that names its function; the module of the function is imported only when the graph has work for it.
`run` is the only caller of passes, and writes down what each pass changed (`Graph.edits`). `bind` makes the graph of a
file: the frontend decodes it, a translation makes ATen calls of ONNX nodes, and the passes of its kind of source
restore what the export changed. `for_step` runs those that depend on the scenario.

The shape is that of onnx/ir-py's `PassManager` (src/onnx_ir/passes/_pass_infra.py) and of sqlglot's optimizer, whose
`RULES` are one tuple (sqlglot/optimizer/optimizer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from operator import attrgetter, is_, is_not
from typing import TYPE_CHECKING, Any

from staticmem.frontends import decode
from staticmem.ir import dtypes
from staticmem.ir.graph import Edit, Graph, Note, Parameter, with_other_call
from staticmem.ir.model_file import Binding, ModelFile
from staticmem.ir.record import record
from staticmem.ops import kinds_of
from staticmem.ops.registry import Kind
from staticmem.scenario.losses import HEAD_LOSSES

if TYPE_CHECKING:
    from staticmem.ir.dtypes import DType
    from staticmem.scenario.adapters import Lora, Quantized
    from staticmem.scenario.step import Scenario


@record(frozen=True, slots=True)
class Preparation:
    """What a graph is prepared for: the scenario, with two facts of the graph before its passes: the parameters in the
    order of `Module.named_parameters()`, and the sizes of the first output where the graph has none."""

    scenario: Scenario
    parameters: tuple[Parameter, ...] = ()
    logits: tuple[int, ...] | None = None


_INPLACE_POLICY = attrgetter("scenario.inplace_activations")


@record(frozen=True, slots=True)
class Pass:
    """One edit of a graph.

    Attributes:
        name: what the edit is called in reports.
        restores: what it puts back or takes away, and why.
        source: the file and project that say so.
        function: `module:function` in `staticmem.passes`. It takes the graph and the context of the run and returns
            the edited graph (the same object where nothing changed) with the notes to add.
        bases: the op bases of which the graph needs at least one, with spaces between; empty: any graph may have work.
        kinds: the kinds of ops (`ops.registry.Kind`) of which the graph needs at least one.
        classes: beginnings of module classes, of which the graph needs at least one where it has classes.
        option: the options of the scenario that the function is given, which alone its result may depend on. Where
            they are False or None the pass does not run. None: the pass always runs.
        fact: the fact of the graph that the function is given besides.
        ensures: what later passes and stages may rely on.
        needed: no graph can do without the edit; those that a request asks for are needed too (`may_be_left_out`).
    """

    name: str
    restores: str
    source: str
    function: str
    bases: str = ""
    option: Callable[[Preparation], object] | None = None
    fact: Callable[[Preparation], object] | None = None
    ensures: str = ""
    classes: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()
    needed: bool = False

    @property
    def may_be_left_out(self) -> bool:
        """Whether the pass only restores what an export lost: a graph without it is still the graph that was given."""
        return not self.needed and self.option in (None, _INPLACE_POLICY)

    def has_work(self, graph: Graph) -> bool:
        """Whether the graph has an op that the edit is about."""
        if self.bases and graph.bases.isdisjoint(self.bases.split()):
            return False
        if self.kinds and not any(kinds_of(base).intersection(self.kinds) for base in graph.bases):
            return False
        return not self.classes or any(cls.startswith(self.classes) or not cls for cls in graph.classes)

    def edit(self, graph: Graph, given: Sequence[object]) -> Graph:
        """The edited graph, with its notes and the record of the edit."""
        module, _, name = self.function.partition(":")
        changed, notes = self.call(getattr(import_module(f"staticmem.passes.{module}"), name), graph, *given)
        if changed is graph and not notes:
            return graph
        before, after = graph.ops, changed.ops
        if len(before) == len(after):
            new = sum(map(is_not, before, after))
        else:
            new = len({*map(id, after)}.difference(map(id, before)))
        return changed.with_edit(Edit(self.name, len(before), len(after), new, tuple(notes)))

    def call(self, function: Any, graph: Graph, *context: Any) -> tuple[Graph, Sequence[Note]]:
        """What the function makes of the graph."""
        edited: tuple[Graph, Sequence[Note]] = function(graph, *context)
        return edited


@record(frozen=True, slots=True)
class Rewrite(Pass):
    """A pass over a graph from ONNX whose function takes an `edit.Ops` and the net, and gives notes or None."""

    def call(self, function: Any, graph: Graph, *context: Any) -> tuple[Graph, Sequence[Note]]:
        from staticmem.passes.edit import Ops

        edited = Ops(graph.ops, graph.outputs)
        (source,) = context
        notes = function(edited, source.net) or ()
        ops = edited.done()
        if len(ops) == len(graph.ops) and all(map(is_, ops, graph.ops)):
            return graph, notes
        return replace(graph, ops=tuple(ops), outputs=tuple(map(edited.final, graph.outputs))), notes


_DECOMPOSITIONS = "torch/_decomp/decompositions.py"
_RECURRENT = "aten::tanh aten::relu aten::mul aten::add"
_LAST_OF_LOSSES = "aten::sub aten::where aten::log1p"

_OF_THE_FILE = (
    Pass(
        "folded norms",
        "nothing: it warns of batch norms that were folded into convolutions",
        "torch/csrc/jit/passes/onnx/eval_peephole.cpp, fuseConvBatchNorm",
        "restoring.evidence:folded_norms",
        kinds=("convolution",),
    ),
    Pass(
        "tensors of the module",
        "parameters, buffers and constants in the sizes that PyTorch stores, without those that no op reads",
        "torch/nn/modules/linear.py and batchnorm.py",
        "restoring.onnx_tensors:own_tensors",
        needed=True,
        ensures="the graph has its parameters, buffers and constants",
    ),
    Pass(
        "lost parameters",
        "nothing: it warns of parameters that the exporter left out with the code that reads them",
        "torch/onnx/_internal/exporter/_core.py; onnx_ir/passes/common, unused_removal.py",
        "restoring.evidence:lost_parameters",
    ),
    Pass(
        "sizes in the data",
        "nothing: it notes the ops whose sizes the data decide",
        "docs/limitations.md",
        "restoring.evidence:sizes_in_data",
        kinds=("data_sized",),
    ),
)

_LOSSES_AND_NORMS = (
    Rewrite(
        "losses",
        "losses that are exported as element-wise ops",
        _DECOMPOSITIONS,
        "restoring.taken_apart:losses",
        _LAST_OF_LOSSES,
    ),
    Rewrite(
        "weight norms",
        "weight_norm, which is exported as a norm, a quotient and a product",
        _DECOMPOSITIONS,
        "restoring.taken_apart:weight_norms",
        "aten::linalg_vector_norm",
    ),
)

_RECURRENT_CALLS = Pass(
    "recurrent layers",
    "one call for all layers of nn.LSTM, nn.GRU or nn.RNN, of which ONNX has an operator each, with gates in its order",
    "aten/src/ATen/native/cudnn/RNN.cpp; onnxscript/function_libs/torch_lib/ops/core.py, aten_lstm",
    "restoring.recurrent_layers:whole_calls",
    "aten::lstm aten::gru aten::rnn_tanh aten::rnn_relu",
)

_REENTRANT = Pass(
    "reentrant checkpoints",
    "gradients of checkpoints with use_reentrant=True, which run their function under no_grad",
    "torch/utils/checkpoint.py, CheckpointFunction.forward",
    "requested.regions:undo_no_grad",
)

_NAMES = Pass(
    "names of ops",
    "one name of an op that has several",
    "torch/csrc/jit/passes/normalize_ops.cpp",
    "restoring.core_aten:names_once",
    kinds=("alias",),
    needed=True,
)

FX_TEXTS: tuple[Pass, ...] = (
    _NAMES,
    Pass(
        "stored tensors",
        "calls that make tensors of zeros or ones: the exporter's optimiser stores their results",
        "onnxscript/optimizer/_constant_folding.py",
        "restoring.onnx_tensors:stored_tensors",
    ),
    Rewrite(
        "promotions",
        "sums of integers that promote inside one kernel: the decomposition casts before them",
        _DECOMPOSITIONS,
        "restoring.core_aten:promotions",
        "prims::convert_element_type",
    ),
    Rewrite(
        "calls of eager code",
        "the calls of eager code, of which run_decompositions makes calls of core ATen",
        _DECOMPOSITIONS,
        "restoring.core_aten:plain_calls",
        ensures="ops have the targets of torch.nn.functional: aten::batch_norm, aten::conv2d",
    ),
    Rewrite(
        "Python numbers",
        "numbers of arithmetic, which the decomposition makes tensors",
        _DECOMPOSITIONS,
        "restoring.core_aten:inline_scalars",
        "aten::scalar_tensor",
    ),
    Rewrite(
        "aliases",
        "nothing of the code: it drops ops that only exports have",
        "torch/_export/passes/lift_constants_pass.py and functionalize_side_effectful_ops_pass.py",
        "restoring.core_aten:drop_aliases",
        "aten::alias aten::lift_fresh_copy aten::lift_fresh aten::_assert_tensor_metadata aten::_assert_async "
        "aten::_assert_scalar aten::sym_constrain_range",
    ),
    Rewrite(
        "noise in place",
        "noise of stochastic depth and dropout_, which functionalisation makes out of place",
        "torchvision/ops/stochastic_depth.py, ATen/native/Dropout.cpp",
        "restoring.views:in_place_noise",
        "aten::bernoulli",
    ),
    Rewrite(
        "adaptive pools",
        "adaptive pools, exported as a mean or as a pool with fixed kernels",
        _DECOMPOSITIONS,
        "restoring.core_aten:adaptive_pools",
        "aten::mean aten::avg_pool1d aten::avg_pool2d aten::avg_pool3d",
    ),
    Rewrite(
        "writes into parts",
        "x[a:b] = y in place on a view, of which functionalisation makes scatters",
        "aten/src/ATen/FunctionalInverses.cpp",
        "restoring.views:writes_into_parts",
        "aten::slice_scatter aten::select_scatter",
    ),
    Rewrite(
        "views",
        "views that are taken once, where functionalisation takes them again for each reader",
        "torch/_functorch/_aot_autograd/functional_utils.py, gen_alias_from_base",
        "restoring.views:views_once",
    ),
    Rewrite(
        "reshapes",
        "reshape, contiguous and flatten, which are exported as clone and view",
        _DECOMPOSITIONS,
        "restoring.core_aten:reshapes",
        "aten::clone aten::_unsafe_view aten::view",
    ),
    Rewrite(
        "packed projections",
        "contiguous() of the packed projection of nn.MultiheadAttention, which optimised exports drop",
        "torch/nn/functional.py, _in_projection_packed",
        "restoring.core_aten:packed_projection",
        "aten::squeeze",
        classes=("torch.nn.modules.activation.",),
    ),
    Rewrite(
        "differences",
        "diff, which is exported as cat, two slices and sub",
        _DECOMPOSITIONS,
        "restoring.core_aten:differences",
        "aten::cat",
    ),
    Rewrite(
        "exponential noise",
        "exponential_(), which is exported as the logarithm of a uniform",
        "torch/_refs/__init__.py, exponential",
        "restoring.taken_apart:exponentials",
        "aten::rand_like",
    ),
    *_LOSSES_AND_NORMS,
    Rewrite(
        "rms norms",
        "rms_norm, which is exported as powers, a mean, a root and products",
        "aten/src/ATen/native/layer_norm.cpp, rms_norm_composite",
        "restoring.taken_apart:rms_norms",
        "aten::rsqrt",
    ),
    Rewrite(
        "recurrent cells",
        "steps of recurrent layers that are exported as element-wise ops",
        "aten/src/ATen/native/RNN.cpp",
        "restoring.recurrent_layers:cells",
        _RECURRENT,
        classes=("torch.nn.modules.rnn.",),
    ),
    Pass(
        "statistics",
        "std, var, cdist and index_add, of which the export makes primitive ops",
        "torch/_refs/__init__.py, torch/_decomp/decompositions.py",
        "restoring.taken_apart:statistics",
        "prims::var aten::index_put aten::sqrt",
    ),
    Pass(
        "calls of modules",
        "the numbers of calls of a module that is called again: the exporter writes the same path for each",
        "torch/onnx/_internal/exporter/_core.py",
        "restoring.module_calls:number_calls",
        ensures="frames of different calls differ",
    ),
    Pass(
        "casts to float32",
        "casts of norms and rotary embeddings, which return their input in a float32 export",
        "transformers, modeling_llama.py and modeling_t5.py",
        "restoring.upcasts:restore_casts",
        classes=("transformers.",),
    ),
    Pass(
        "casts of lines",
        "casts that end a line of the model's code (`head(x).float()`), which return their input in a float32 export",
        "aten/src/ATen/native/TensorConversions.cpp, to_impl",
        "restoring.upcasts:casts_of_lines",
    ),
    Pass(
        "regions without grad",
        "regions of torch.no_grad() and torch.autocast(), of which the exporter makes graphs of their own",
        "torch/_export/passes/replace_set_grad_with_hop_pass.py and replace_autocast_with_hop_pass.py",
        "restoring.module_calls:regions_without_grad",
    ),
    _RECURRENT_CALLS,
    *_OF_THE_FILE,
    _REENTRANT,
)
"""Passes over ONNX files whose nodes carry the texts of FX nodes: those of torch.onnx.export(dynamo=True)."""

NODES: tuple[Pass, ...] = (
    Pass(
        "merged calls",
        "equal calls of modules of a list, which the TorchScript exporter merges into one",
        "torch/csrc/jit/passes/common_subexpression_elimination.cpp",
        "restoring.module_calls:run_in_each",
    ),
    Rewrite(
        "augmented parts",
        "x[a:b] += y, which the TorchScript exporter writes as two assignments",
        "torch/csrc/jit/passes/onnx/remove_inplace_ops_for_onnx.cpp",
        "restoring.views:augmented_parts",
        "aten::copy_",
    ),
    Pass(
        "unused ops",
        "nothing of the code: it drops ops whose results no op and no caller reads",
        "torch/csrc/jit/passes/dead_code_elimination.h",
        "restoring.from_nodes:drop_unused",
    ),
    *_LOSSES_AND_NORMS,
    Rewrite(
        "recurrent cells",
        "steps of recurrent layers that are exported as element-wise ops",
        "aten/src/ATen/native/RNN.cpp",
        "restoring.recurrent_layers:traced_cells",
        _RECURRENT,
    ),
    Pass(
        "operators on integers",
        "nothing: it notes the operators that have no counterpart in ATen",
        "onnx/docs/Operators.md",
        "restoring.evidence:integer_results",
        kinds=("integer",),
    ),
    _RECURRENT_CALLS,
    *_OF_THE_FILE,
)
"""Passes over ONNX files of the TorchScript exporter and of others, of which only the nodes tell."""

EXPORTED: tuple[Pass, ...] = (_NAMES, _REENTRANT)
"""Passes over archives of torch.export: they have the calls of eager code, with modules and what ran in place."""

IN_PLACE = (
    Pass(
        "products with sigmoid",
        "x * sigmoid(x) and x * tanh(softplus(x)) of the code, which have the nodes of silu and mish",
        "torch/onnx/_internal/torchscript_exporter/symbolic_opset9.py, silu",
        "restoring.inplace:take_apart",
        "aten::silu aten::mish",
        _INPLACE_POLICY,
    ),
    Pass(
        "in place",
        "activations and residual adds that ran in place: exports to ONNX make every op out of place",
        "the sources of torchvision, timm and transformers, and the source lines in the file",
        "restoring.inplace:run_in_place",
        option=_INPLACE_POLICY,
        ensures="a target that ends with an underscore writes into its first argument",
    ),
)

_TRAINING = attrgetter("scenario.training")


def _is_inference(preparation: Preparation) -> bool:
    return not preparation.scenario.training


def _cast_of_model(preparation: Preparation) -> DType | None:
    """The 16-bit type that the whole model is cast to."""
    dtype = preparation.scenario.dtype
    return dtype if dtype in dtypes.HALVES else None


def _frozen_names(preparation: Preparation) -> str | None:
    return preparation.scenario.freeze if preparation.scenario.training else None


def _quantized_weights(preparation: Preparation) -> tuple[Quantized, bool] | None:
    """The weights, and whether the step trains."""
    scenario = preparation.scenario
    return None if scenario.quantize is None else (scenario.quantize, scenario.training)


def _adapters(preparation: Preparation) -> tuple[Lora, DType | None, DType | None, bool] | None:
    """Adapters, the types of autocast and of the whole model where they are given, and whether dropout is on."""
    scenario = preparation.scenario
    return None if scenario.lora is None else (scenario.lora, scenario.amp, scenario.dtype, scenario.training)


def _head_loss(preparation: Preparation) -> tuple[str, int | None] | None:
    """A loss that stands in the graph, and the labels of a target of `ctc`."""
    scenario = preparation.scenario
    if not scenario.training or scenario.loss not in HEAD_LOSSES:
        return None
    return scenario.loss, scenario.target_length


_QUANTISED = Pass(
    "quantised weights",
    "weights of linear layers in few bits, with their statistics, as bitsandbytes holds them",
    "transformers/integrations/bitsandbytes.py, replace_with_bnb_linear",
    "requested.quantized_weights:quantize",
    option=_quantized_weights,
)
STEP = (
    Pass(
        "variables let go of",
        "nothing that the file lost: values end after their last use whose variables the code is to let go of",
        "a recording of the code",
        "requested.let_go:let_go",
        option=attrgetter("scenario.let_go"),
    ),
    Pass(
        "code of training alone",
        "the graph of inference, without lines that run in training alone: `... if self.training else None`",
        "torch/nn/modules/module.py, Module.train",
        "requested.training_code:drop_training_code",
        option=_is_inference,
    ),
    *IN_PLACE,
    Pass(
        "unfolded batch norms",
        "batch norms that an export in inference mode folded into convolutions",
        "torch/nn/utils/fusion.py, fuse_conv_bn_eval",
        "restoring.batch_norms:unfold_batch_norms",
        option=attrgetter("scenario.unfold_batchnorm"),
        kinds=("convolution",),
    ),
    Pass(
        "batch norms in training",
        "the training form of batch norms that were exported in eval mode",
        "torch/nn/modules/module.py, Module.train",
        "restoring.batch_norms:train_batch_norm",
        "aten::batch_norm",
        _TRAINING,
    ),
    Pass(
        "batch norms in place",
        "nothing that the file lost: batch norms with their activation as InPlaceABN, which overwrites its input",
        "mapillary/inplace_abn, inplace_abn/functions.py",
        "requested.inplace_abn:replace_norms",
        option=attrgetter("scenario.inplace_abn"),
    ),
    Pass(
        "custom functions",
        "nothing: it names custom autograd functions, of whose backward the file says nothing",
        "torch/autograd/function.py, Function.apply",
        "restoring.evidence:name_custom_functions",
        option=_TRAINING,
    ),
    Pass(
        "tied parameters",
        "one storage under several names, of which exports keep one",
        "transformers/modeling_utils.py, tie_weights",
        "requested.parameters:tie_parameters",
        needed=True,
        ensures="a parameter comes after the one whose storage it shares",
    ),
    Pass(
        "attention masks",
        "attention without masks, or with is_causal: transformers builds masks only while it exports",
        "transformers/masking_utils.py, _ignore_causal_mask_sdpa",
        "restoring.masks:drop_masks",
        "aten::scaled_dot_product_attention aten::where",
    ),
    Pass(
        "products of experts",
        "the products that transformers runs on a GPU, and casts to the type of weights: an export has resolved it",
        "transformers/integrations/moe.py, _grouped_mm",
        "restoring.masks:run_grouped",
        "aten::_grouped_mm transformers::grouped_mm_fallback",
        classes=("transformers.",),
    ),
    Pass(
        "dtypes of lines",
        "which of the casts to float32 the code names, and which have the dtype of a tensor: an export has resolved it",
        "source lines of stack traces",
        "restoring.upcasts:dtypes_of_lines",
        kinds=("cast", "factory"),
        option=_cast_of_model,
    ),
    Pass(
        "noise of stochastic depth",
        "the dtype of the noise, which is that of the tensor it multiplies: an export has resolved it",
        "torchvision/ops/stochastic_depth.py",
        "restoring.views:follow_operand",
        "aten::empty",
    ),
    Pass(
        "trained parameters",
        "requires_grad of a file that was exported for inference, in which no parameter has it",
        "torch/nn/modules/module.py, Module.requires_grad_",
        "requested.parameters:thaw",
        option=_TRAINING,
    ),
    Pass(
        "frozen parameters",
        "requires_grad False of the parameters whose names match --freeze",
        "torch/nn/modules/module.py, Module.named_parameters",
        "requested.parameters:freeze",
        option=_frozen_names,
        fact=attrgetter("parameters"),
    ),
    _QUANTISED,
    Pass(
        "adapters",
        "low-rank adapters of --lora beside layers, and everything else frozen",
        "peft/tuners/lora/layer.py, Linear.forward",
        "requested.adapters:insert",
        option=_adapters,
    ),
    Pass(
        "expert parallelism",
        "nothing that the file lost: experts of one rank of several, with the exchange of tokens between them",
        "torchtitan/models/common/token_dispatcher.py, AllToAllTokenDispatcher",
        "requested.expert_parallel:split_experts",
        option=attrgetter("scenario.experts"),
    ),
    Pass(
        "context parallelism",
        "nothing that the file lost: attention of one rank of several, which have a part of the sequence each",
        "torch/distributed/tensor/experimental/_context_parallel/_attention.py, _templated_ring_attention",
        "requested.expert_parallel:split_sequence",
        option=attrgetter("scenario.context"),
    ),
    Pass(
        "loss of the last linear layer",
        "nothing that the file lost: it adds the loss of --loss, in which the last linear layer may run",
        "transformers/loss/loss_utils.py, torchtune/modules/loss, liger_kernel/ops/fused_linear_cross_entropy.py",
        "requested.head_losses:end_with_loss",
        option=_head_loss,
        fact=attrgetter("logits"),
        ensures="the first output is the loss",
    ),
)
"""Passes that depend on what the step is asked to do."""


_ON_RECORDINGS = (
    "variables let go of",
    "products of experts",
    "batch norms in place",
    "trained parameters",
    "frozen parameters",
    "quantised weights",
    "adapters",
    "expert parallelism",
    "context parallelism",
    "loss of the last linear layer",
)
DECODER = tuple(each for each in STEP if each.name != "attention masks")
"""Passes over a decoder for generation, which makes the masks of its steps itself (`passes.requested.generation`)."""

RECORDED = (_NAMES, *(each for each in STEP if each.name in _ON_RECORDINGS))
"""Passes over the programs of a recording, which have what really ran: those that the scenario asks for, and casts
whose type another tensor decides."""


_RECORDED_DECODER = _NAMES, _QUANTISED


def run(passes: Iterable[Pass], graph: Graph, context: object) -> Graph:
    """The graph after all passes that have work, in order.

    Versions for a step are kept with the graph that they were made of (`Graph.version`), by the options that each pass
    was given, so that studies of one file share the passes that their requests have in common.
    """
    for each in passes:
        if each.name in graph.without:
            continue
        if not isinstance(context, Preparation):
            graph = each.edit(graph, (context,)) if each.has_work(graph) else graph
            continue
        given = each.option(context) if each.option is not None else True
        if given not in (False, None, ()) and each.has_work(graph):
            facts = () if each.fact is None else (each.fact(context),)
            graph = graph.version(f"{each.name}: {given}", partial(each.edit, given=(given, *facts)))
    return graph


def bind(model: ModelFile, binding: Binding) -> Graph:
    """The graph of a file at these sizes, as eager PyTorch runs it.

    Passes of `binding.without` are left out, in `for_step` too, and the graph has a note of each.

    Raises:
        DimensionError: a size contradicts a shape that is fixed in the file; the message names the node.
    """
    graphs = model.graphs
    return _bound(model, binding) if graphs is None else graphs.of(binding, lambda: _bound(model, binding))


def _bound(model: ModelFile, binding: Binding) -> Graph:
    decoded = decode(model, binding)
    without = binding.without
    if isinstance(decoded, Graph):
        return run(EXPORTED, _leaving_out(decoded, without), None)
    from staticmem.frontends.onnx.reader import guarded
    from staticmem.passes.restoring.onnx_tensors import FromOnnx

    with guarded(model.path):
        if decoded.has_fx_texts and _TEXTS not in without:
            from staticmem.passes.restoring.from_fx_texts import translate

            passes = FX_TEXTS
        else:
            from staticmem.passes.restoring.from_nodes import translate

            passes = NODES
        source = FromOnnx(decoded, translate(decoded.net, without))
        graph = run(passes, _leaving_out(source.graph(), without), source)
    large = decoded.large
    del decoded, source
    if large:
        from staticmem.frontends.onnx.shapes import give_back

        give_back()
    return graph


_TEXTS = "texts of the exporter"  # in metadata of nodes; without them the nodes alone tell what ran


def _leaving_out(graph: Graph, without: frozenset[str]) -> Graph:
    """The graph before passes, of which some are left out."""
    if not without:
        return graph
    text = "not restored, because the graph did not evaluate with it, so figures are those without"
    notes = [Note("warning", "SM380", f"{name}: {text}") for name in sorted(without)]
    return replace(graph, without=without, notes=(*graph.notes, *notes))


def passes_to_leave_out(graph_works: Callable[[frozenset[str]], bool]) -> frozenset[str] | None:
    """The passes that make a readable graph unreadable, as few as it takes; None where that is not the passes' doing.

    A pass that restores something must never refuse a file that evaluates without it. Whether a graph evaluates is
    known once its step has run, so nothing is checked before a step fails: only then is it run again, without
    everything that may be left out, and while that works, with half of what is left out put back. `graph_works` runs
    it without the passes of these names, groups of nodes (`patterns.PATTERNS`) among them.
    """
    from staticmem.passes.restoring.patterns import PATTERNS

    passes = (*FX_TEXTS, *NODES, *EXPORTED, *STEP)
    names = [_TEXTS, *(name for name, *_ in PATTERNS), *(each.name for each in passes if each.may_be_left_out)]
    needed = list(dict.fromkeys(names))
    if not graph_works(frozenset(needed)):
        return None
    size = len(needed)
    while size:
        size = (size + 1) // 2
        for start in range(0, len(needed), size)[::-1]:
            fewer = needed[:start] + needed[start + size :]
            if graph_works(frozenset(fewer)):
                needed = fewer
        if size == 1:
            break
    return frozenset(needed) or None


def edit_lines(graph: Graph) -> list[str]:
    """What each pass did, as lines of text."""
    lines = []
    for edit in graph.edits:
        ops = f"{edit.before:,} ops" + (f" -> {edit.after:,}" if edit.after != edit.before else "")
        lines.append(f"pass '{edit.name}': {ops}, {edit.changed:,} of them new or changed")
        lines += [f"  {note.text} [{note.code}] x{note.count:,}" for note in edit.notes]
    return lines


def for_step(
    graph: Graph, scenario: Scenario, passes: Iterable[Pass] = STEP, logits: tuple[int, ...] | None = None
) -> Graph:
    """The graph that a step of the scenario runs. `logits` are sizes of the first output, which a loss of the last
    layer needs."""
    training = scenario.training
    if graph.programs is not None:
        programs, amp, dtype = graph.programs, scenario.amp, scenario.dtype
        graph = graph.version(f"program {training} {amp} {dtype}", lambda _: programs.of(training, amp, dtype))
        passes = RECORDED if passes is STEP else _RECORDED_DECODER
    preparation = Preparation(scenario, graph.parameters, logits)
    graph = run(passes, graph, preparation)
    if graph.recorded is None or graph.recorded.other_call is None:
        return graph
    other = run(passes, graph.recorded.other_call, preparation)
    return graph.version(f"other call {id(other)}", lambda call: with_other_call(call, other))
