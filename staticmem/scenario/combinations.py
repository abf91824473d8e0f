"""What does not go together: one table, and the check that walks it.

A request is checked when it becomes a step (`STEPS`), when that is divided (`RANKS`), and by verbs that have words of
their own (`FIT`, `SIZE`, `LARGEST`). What only a graph shows is refused where it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.record import record
from staticmem.scenario.adapters import FOUR_BITS, WEIGHT_ONLY
from staticmem.scenario.compiling import GRAPH_MODES, WHOLE
from staticmem.scenario.edits import BATCH_OF_LOOP, OF_LOOP
from staticmem.scenario.losses import HEAD_LOSSES, MAX_LABELS, has_terms
from staticmem.scenario.optimizers import FUSED, LOW_RANK, TORCHAO
from staticmem.scenario.options import Option
from staticmem.scenario.strategies import BLOCKS, STRATEGIES, StrategyFacts
from staticmem.scenario.strategies import WEIGHT_ONLY as WEIGHTS_ALONE

Values = Mapping[str, Any]  # of the options that differ from their defaults


@record(frozen=True)
class Side:
    """An option that is given. `text` is how errors write it, with its value in the place of its name in braces;
    `test` says which values are meant, where it is not all; `absent`: the option has none of these values."""

    option: str
    text: str
    test: Callable[[Any], bool] | None = None
    absent: bool = False

    def holds(self, given: Values) -> bool:
        """Whether it is so with these options."""
        present = self.option in given and (self.test is None or self.test(given[self.option]))
        return present is not self.absent


Sides = Side | tuple[Side, ...]  # of several one is enough


@record(frozen=True)
class Combination:
    """What does not go together: `one` with `other`, or without it where that is absent. `code` is that of the error,
    and `what` its first sentence where it is not the usual one. `also` has to hold besides, and `when` of the
    values, with its words.
    """

    one: Sides
    other: Sides
    code: str
    what: str = ""
    also: tuple[Side, ...] = ()
    when: tuple[str, Callable[[Values], bool]] | None = None

    def match(self, given: Values) -> tuple[Side, Side] | None:
        """The two sides among these options."""
        one = _first(self.one, given)
        other = _first(self.other, given) if one is not None else None
        if one is None or other is None or (self.when is not None and not self.when[1](given)):
            return None
        for besides in self.also:
            if not besides.holds(given):
                return None
        return one, other


Table = Mapping[Combination, tuple[str, str]]  # why, and what to do instead: with values of options, {one} and {other}


def check(table: Table, given: Values) -> None:
    """Checks what is given of a request (`Request.given`), and of a verb.

    Raises:
        UsageError: some do not go together. The first row that finds it is said.
    """
    for row, (why, instead) in table.items():
        sides = row.match(given)
        if sides is not None:
            values = {"optimizer": "a step without optimizer", **given, "twice": 2 * given.get("context_parallel", 0)}
            values["one"], values["other"] = (side.text.format_map(values) for side in sides)
            usual = "{one} needs {other}" if sides[1].absent else "{one} and {other} cannot be combined"
            what, why, instead = (text.format_map(values) for text in (row.what or usual, why, instead))
            raise UsageError(what, why, instead, row.code)


def _first(sides: Sides, given: Values) -> Side | None:
    for side in sides if isinstance(sides, tuple) else (sides,):
        if side.holds(given):
            return side
    return None


def side(option: str, text: str = "", values: tuple[object, ...] | Callable[[Any], bool] | None = None) -> Side:
    """A side that is written as its flag where no text is given, of all values or of these."""
    test = values.__contains__ if isinstance(values, tuple) else values
    return Side(option, text or f"--{option.replace('_', '-')}", test)


def without(other: Side) -> Side:
    """The option has none of these values."""
    return replace(other, absent=True)


def of_owners(options: Iterable[Option]) -> Iterator[tuple[Combination, tuple[str, str]]]:
    """Rows of options that some optimizers have, which do not go with the others."""
    for one in options:
        if one.owners:
            code, also = ("SM132", ()) if one.name == "momentum" else ("SM161", (TRAINING,))
            others = without(side("optimizer", "", one.owners))
            row = Combination(side(one.name, one.flag), others, code, "{one} does not apply to {optimizer}", also)
            instead = f"Use --optimizer {one.owners[0]}, or leave {one.flag} out."
            yield row, (f"It is an option of {' and '.join(one.owners)}.", instead)


def _several(number: int) -> bool:
    return number > 1


def _strategies(test: Callable[[StrategyFacts], object], text: str = "--parallel {parallel}") -> Side:
    return side("parallel", text, lambda name: bool(test(STRATEGIES[name])))


TRAINING = side("mode", "training", ("train",))
GENERATE = side("mode", "--mode generate", ("generate",))
SERVE = side("mode", "--mode serve", ("serve",))
OPTIMIZER = side("optimizer", "{optimizer}")
FUSED_STEP = side("optimizer_impl", "", ("fused",))
CLIP = side("clip_grad_norm")
COMPILE, COMPILE_MODE = side("compile"), side("compile_mode")
CUDA_GRAPHS = side("compile_mode", "--compile-mode {compile_mode}", GRAPH_MODES)
HEAD_LOSS = side("loss", "--loss {loss}", HEAD_LOSSES)
LORA, DORA = side("lora"), side("lora", "--lora dora=true", lambda lora: bool(lora.dora))
_QUANTIZE = "--quantize {quantize}"
QUANTIZE, PACKED = side("quantize"), side("quantize", _QUANTIZE)
PACKED_BY_TORCHAO = side("quantize", _QUANTIZE, WEIGHT_ONLY)
CHECKPOINT, CHECKPOINT_SAVE = side("checkpoint"), side("checkpoint_save")
OFFLOAD = side("offload_activations", "--offload-activations {offload_activations}")
INPLACE_ABN = side("inplace_abn")
LET_GO = side("let_go")
GO_OF_LOOP = side("let_go", "--let-go NAME@loop", lambda names: not {*OF_LOOP}.isdisjoint(names))
GO_OF_BATCH = side("let_go", f"--let-go {BATCH_OF_LOOP}", lambda names: BATCH_OF_LOOP in names)
PROMPT, NEW_TOKENS = side("prompt"), side("new_tokens")
DEVICES, STRATEGY = side("devices"), side("parallel")
PARALLEL = side("parallel", "--parallel {parallel}")
DIVIDING = _strategies(lambda facts: not facts.keeps_whole)
RUNS_PARTS = _strategies(lambda facts: facts.runs_parts)
EXPERTS = side("expert_parallel", "--expert-parallel {expert_parallel}")
EXPERT_RANKS = side("expert_parallel", "--expert-parallel {expert_parallel}", _several)
REPLICAS = side("replicas", "--replicas {replicas}")
OFFLOADED_SHARDS = side("offload_parameters")
REPLICAS_OF_SHARDS = side("replicas", "--replicas {replicas}", _several)
CONTEXT = side("context_parallel", "--context-parallel {context_parallel}")
CONTEXT_RANKS = side("context_parallel", "--context-parallel {context_parallel}", _several)
GLOBAL_BATCH, MAX_DIM = side("global_batch"), side("max_dim")

_BESIDE_CONTEXT = (COMPILE, side("expert_parallel"), GENERATE, CHECKPOINT_SAVE, side("offload_activations"))
_GROUPS = "The devices are groups of ranks, and the ranks of each group share"
_NOT_DIVIDING = "{one} does not divide --devices {devices}"
_NO_MULTIPLE = "the second is no multiple of the first"
_DIVISOR = "Give a divisor of the number of devices."
_DIVIDED = "How the strategy divides packed weights and their statistics is not covered."
_OVERWRITTEN = (
    "They are in the pool of the CUDA graphs, which the next forward takes again: PyTorch raises an error "
    "('accessing gradient tensor output of CUDAGraphs that has been overwritten')."
)

STEPS: Table = {
    Combination(COMPILE_MODE, without(COMPILE), "SM185"): ("It is the mode of torch.compile.", "Add --compile."),
    Combination(SERVE, SERVE, "SM600", "{one} is not answered here"): (
        "An engine has no step of PyTorch: its parts are those of a process that serves.",
        "Use staticmem analyze MODEL --mode serve --gpu NAME (or size, sweep, fit), or staticmem.serve() in Python.",
    ),
    Combination(CUDA_GRAPHS, PARALLEL, "SM185"): (
        "What the hooks of a strategy do between CUDA graphs is not covered.",
        "Leave one of them out.",
    ),
    Combination(COMPILE, _strategies(lambda facts: not facts.compiles), "SM167"): (
        "What compiled code does under it is not covered; under DDP, and in blocks under FSDP2, it is.",
        "Leave one of them out, or use --parallel ddp, or --parallel fsdp --compile CLASS.",
    ),
    Combination(
        side("compile", "--compile of the whole model", lambda modules: WHOLE in modules),
        _strategies(lambda facts: facts.compiles == BLOCKS),
        "SM167",
    ): (
        "The hooks of FSDP2 around each block break the compiled graph there, in ways that are not covered.",
        "Compile the blocks: --compile and the name of their class.",
    ),
    Combination(EXPERTS, without(_strategies(lambda facts: facts.experts, "--parallel fsdp")), "SM109"): (
        "Ranks that share experts shard everything else by FSDP2, as in torchtitan.",
        "Example: --parallel fsdp --devices 8 --expert-parallel {expert_parallel}",
    ),
    Combination(
        EXPERTS,
        DEVICES,
        "SM109",
        _NOT_DIVIDING,
        when=(_NO_MULTIPLE, lambda given: given["devices"] % given["expert_parallel"] != 0),
    ): (f"{_GROUPS} the experts of all layers.", _DIVISOR),
    Combination(EXPERT_RANKS, (COMPILE, LORA, QUANTIZE, CLIP), "SM109"): (
        "What it does to experts on several ranks is not covered.",
        "Leave {other} out.",
    ),
    Combination(REPLICAS, without(_strategies(lambda facts: facts.shards_modules, "--parallel fsdp")), "SM244"): (
        "Each group of ranks has the whole model, which FSDP2 divides within the group.",
        "Example: --parallel fsdp --devices 8 --replicas {replicas}",
    ),
    Combination(
        REPLICAS,
        DEVICES,
        "SM244",
        _NOT_DIVIDING,
        when=(_NO_MULTIPLE, lambda given: given["devices"] % given["replicas"] != 0),
    ): (f"{_GROUPS} the parameters of the model.", _DIVISOR),
    Combination(REPLICAS_OF_SHARDS, (EXPERTS, CONTEXT), "SM244"): (
        "What they do together is not covered.",
        "Leave {other} out.",
    ),
    Combination(
        OFFLOADED_SHARDS, without(_strategies(lambda facts: facts.shards_modules, "--parallel fsdp")), "SM245"
    ): ("It is FSDP2 that copies shards to the GPU and gradients back.", "Example: --parallel fsdp --devices 8 {one}"),
    Combination(OFFLOADED_SHARDS, side("devices", "--devices 1", lambda devices: devices == 1), "SM245"): (
        "A device that shares with no other gathers nothing.",
        "Use --offload-optimizer, or two devices.",
    ),
    Combination(OFFLOADED_SHARDS, (REPLICAS_OF_SHARDS, EXPERTS, QUANTIZE), "SM245"): (
        "What they do together is not covered.",
        "Leave {other} out.",
    ),
    Combination(side("rotate_method"), without(side("context_parallel")), "SM243"): (
        "It is how keys and values come from other ranks.",
        "Add --context-parallel N.",
    ),
    Combination(CONTEXT, _strategies(lambda facts: not facts.sequences), "SM243"): (
        "Context parallelism is covered alone and beside FSDP2, whose shards are divided over its ranks too.",
        "Example: --parallel fsdp --devices {twice} --context-parallel {context_parallel}",
    ),
    Combination(
        CONTEXT,
        DEVICES,
        "SM243",
        "{one} alone is on {context_parallel} devices, not {devices}",
        (without(PARALLEL),),
        ("the numbers differ", lambda given: bool(given["devices"] != given["context_parallel"])),
    ): ("Beside it nothing is divided over further devices.", "Leave --devices out, or add --parallel fsdp."),
    Combination(
        CONTEXT,
        DEVICES,
        "SM243",
        _NOT_DIVIDING,
        when=(_NO_MULTIPLE, lambda given: given["devices"] % given["context_parallel"] != 0),
    ): (f"{_GROUPS} the sequence of its samples.", _DIVISOR),
    Combination(CONTEXT_RANKS, side("sdpa", "--sdpa math", ("math",)), "SM243"): (
        "PyTorch divides its fused kernels alone.",
        "Leave {other} out.",
    ),
    Combination(CONTEXT_RANKS, _BESIDE_CONTEXT, "SM243"): (
        "What they do together is not covered.",
        "Leave {other} out.",
    ),
    Combination(OFFLOAD, _strategies(lambda facts: facts.divides_parameters), "SM179"): (
        "Autograd saves weights too, and what a strategy that divides them copies to the CPU is not covered.",
        "Use --checkpoint, or --parallel ddp, zero1 or zero2.",
    ),
    Combination(
        side("target_length", "--target-length {target_length}"),
        without(side("loss", "", ("ctc",))),
        "SM130",
        "{one} does not apply",
    ): (
        f"It is the labels of the longest target of --loss ctc, from 1 to {MAX_LABELS:,}.",
        "Use --loss ctc --target-length 50, or leave it out.",
    ),
    Combination((HEAD_LOSS, side("loss", "--loss {loss}", has_terms)), RUNS_PARTS, "SM282", also=(TRAINING,)): (
        "How a divided model runs this loss is not covered.",
        "Use --loss cross-entropy.",
    ),
    Combination(side("optimizer", "{optimizer}", ("muon", *LOW_RANK)), DIVIDING, "SM127", also=(TRAINING,)): (
        "It reads whole matrices, and how a library divides its work among GPUs is not covered.",
        "Use --parallel ddp, or --optimizer adamw.",
    ),
    Combination(side("optimizer", "{optimizer}", TORCHAO), DIVIDING, "SM127", also=(TRAINING,)): (
        "Which blocks of a divided parameter its states have is not covered.",
        "Use --parallel ddp, or --optimizer adamw.",
    ),
    Combination(DORA, RUNS_PARTS, "SM187"): (
        "How the norms of divided weights are computed is not covered.",
        "Leave out dora, or use --parallel fsdp.",
    ),
    Combination(side("kbit_training"), without(QUANTIZE), "SM188"): (
        "prepare_model_for_kbit_training is for models whose weights were loaded in 4 or 8 bits.",
        "Add --quantize nf4.",
    ),
    Combination(PACKED_BY_TORCHAO, _strategies(lambda facts: WEIGHTS_ALONE not in facts.packed), "SM188"): (
        _DIVIDED,
        "Leave one of them out, or use --parallel ddp.",
    ),
    Combination(side("quantize", _QUANTIZE, ("int8",)), _strategies(lambda facts: 8 not in facts.packed), "SM188"): (
        _DIVIDED,
        "Leave one of them out, or use --parallel ddp, zero1 or zero2.",
    ),
    Combination(side("quantize", _QUANTIZE, FOUR_BITS), _strategies(lambda facts: 4 not in facts.packed), "SM188"): (
        _DIVIDED,
        "Leave one of them out, or use --parallel ddp, zero2 or fsdp.",
    ),
    Combination((PROMPT, NEW_TOKENS, side("sampling"), side("cache")), without(GENERATE), "SM124"): (
        "It says what a decoder generates.",
        "Add --mode generate, or leave it out.",
    ),
    Combination(GENERATE, (without(PROMPT), without(NEW_TOKENS)), "SM124", "{one} needs --prompt and --new-tokens"): (
        "How many tokens are cached decides the memory.",
        "Example: --mode generate --prompt 2048 --new-tokens 512",
    ),
    Combination((COMPILE, STRATEGY, LORA, LET_GO), GENERATE, "SM124"): (
        "Generation is predicted as eager PyTorch runs the exported decoder on one device.",
        "Leave {one} out.",
    ),
    Combination(side("checkpoint_every", "", _several), without(CHECKPOINT), "SM160"): (
        "It groups the modules that --checkpoint names.",
        "Name the class or the paths of the blocks with --checkpoint.",
    ),
    Combination(CHECKPOINT_SAVE, without(CHECKPOINT), "SM160"): (
        "It says which results the checkpoints of those modules keep.",
        "Name the class or the paths of the blocks with --checkpoint.",
    ),
    Combination(side("checkpoint_sequential"), without(side("checkpoint_segments")), "SM160"): (
        "It names the Sequential that is divided.",
        "Add --checkpoint-segments sqrt.",
    ),
    Combination(side("backward", "--no-backward"), OPTIMIZER, "SM166", "{one} leaves no gradients for {other}"): (
        "An optimizer's step needs those of a backward.",
        "Use --mode train without --optimizer.",
    ),
    Combination(HEAD_LOSS, COMPILE, "SM282", also=(TRAINING,)): (
        "The loss would run inside of the compiled code, which is not covered.",
        "Use --loss cross-entropy, which runs after it.",
    ),
    Combination(LET_GO, COMPILE, "SM287"): ("Compiled code has no variables.", "Leave one of them out."),
    Combination(GO_OF_LOOP, without(TRAINING), "SM287"): (
        "A forward alone has its inputs until it returns, and no loss.",
        "Add --mode train, or --outputs dropped in its place.",
    ),
    Combination(GO_OF_BATCH, (side("input_grad"), STRATEGY, side("context_parallel")), "SM287"): (
        "What else has the inputs of a step then is not covered.",
        "Leave one of them out.",
    ),
    Combination(OFFLOAD, COMPILE, "SM179"): (
        "What compiled code saves under hooks of saved tensors is not covered.",
        "Use --checkpoint, or --activation-memory-budget, which the compiler has itself.",
    ),
    Combination(
        side("grad_scaler"),
        (without(FUSED_STEP), CLIP),
        "SM230",
        "{one} cannot unscale gradients in float16",
        (OPTIMIZER, side("dtype", "--dtype fp16", (dtypes.float16,))),
    ): (
        "PyTorch raises an error for parameters in float16 ('Attempting to unscale FP16 gradients.').",
        "Use --amp fp16, which keeps parameters in float32, or leave --grad-scaler out.",
    ),
    Combination(INPLACE_ABN, COMPILE, "SM138"): (
        "Dynamo breaks its graph at the op of an extension, which is not covered.",
        "Leave one of them out.",
    ),
    Combination(
        INPLACE_ABN,
        (side("dtype", "--dtype bf16", (dtypes.bfloat16,)), side("amp", "--amp bf16", (dtypes.bfloat16,))),
        "SM138",
        "{one} has no kernels for bfloat16",
    ): ("src/inplace_abn_cuda.cu knows float32, float64 and float16.", "Use --amp fp16, or float32."),
    Combination(
        FUSED_STEP,
        without(side("optimizer", "", FUSED)),
        "SM133",
        "{optimizer} has no fused implementation",
        (OPTIMIZER, TRAINING),
    ): (f"Fused kernels exist for {', '.join(FUSED)}.", "Use --optimizer-impl foreach."),
    Combination(side("optimizer", "{optimizer}", LOW_RANK), LORA, "SM161", also=(TRAINING,)): (
        "Which layers of adapters would be projected is not covered; both make the state small.",
        "Leave one of them out.",
    ),
    Combination(
        side("nesterov"),
        (without(side("momentum")), side("dampening")),
        "SM161",
        "{one} needs a momentum and no dampening",
    ): ("torch.optim.SGD says the same.", "Add --momentum 0.9."),
    Combination(side("activation_memory_budget", "", lambda share: share < 1), without(COMPILE), "SM168"): (
        "The budget is an option of the compiler's partitioner; eager code saves what each op reads.",
        "Add --compile, or use --checkpoint.",
    ),
    Combination(
        CUDA_GRAPHS,
        (side("accumulate"), side("set_to_none", "--no-set-to-none")),
        "SM185",
        "{one} keeps no gradients for another backward",
    ): (_OVERWRITTEN, "Leave out --accumulate and --no-set-to-none, or --compile-mode."),
    Combination(DORA, COMPILE, "SM187"): (
        "How Inductor fuses the norms of the weights is not covered.",
        "Leave out dora, or --compile.",
    ),
    Combination(PACKED_BY_TORCHAO, TRAINING, "SM188"): (
        "Weights that torchao packs are not trained.",
        "Use --mode infer.",
    ),
    Combination(PACKED_BY_TORCHAO, LORA, "SM188"): ("Adapters beside them are not covered.", "Leave --lora out."),
    Combination(PACKED_BY_TORCHAO, COMPILE, "SM188"): (
        "How Inductor fuses these products is not covered.",
        "Leave --compile out.",
    ),
    Combination(PACKED_BY_TORCHAO, side("amp"), "SM188"): (
        "Autocast in torchao's layers is not covered.",
        "Use --dtype bf16.",
    ),
    Combination(PACKED, without(LORA), "SM188", "{one} leaves no weights to train", (TRAINING,)): (
        "Packed weights have no gradient: they are trained through adapters, or not at all.",
        "Add --lora r=16,alpha=32,targets=all-linear, or use --mode infer.",
    ),
}
RANKS: Table = {
    Combination(PARALLEL, without(DEVICES), "SM180"): (
        "What a device holds depends on how many share the work.",
        "Example: --parallel {parallel} --devices 8; 'staticmem size' finds the fewest.",
    )
}
FIT: Table = {
    **RANKS,
    Combination(GLOBAL_BATCH, (side("batch"), side("accumulate")), "SM135", "{one} with {other}"): (
        "A global batch is shared out: the micro-batch and their number are found.",
        "Leave {other} out.",
    ),
}
SIZE: Table = {
    Combination(MAX_DIM, (side("no_batches"), GLOBAL_BATCH), "SM199", "{one} with {other}"): (
        "The search makes the dimension larger at one batch, instead of the search of batches.",
        "Leave one of them out: --max-dim, or {other}.",
    ),
    Combination(GLOBAL_BATCH, (side("batch"), STRATEGY, DEVICES, side("accumulate")), "SM135", "{one} with {other}"): (
        "A global batch is shared out in every way that fits: its share, the strategy and the devices are found.",
        "Leave {other} out.",
    ),
    Combination(GLOBAL_BATCH, without(TRAINING), "SM135", "{one} without {other}"): (
        "It is the samples of a step of the optimizer.",
        "Name an optimizer: --optimizer adamw",
    ),
    Combination(REPLICAS, without(DEVICES), "SM244", "size {one} needs --devices"): (
        "The search for the fewest devices has one group of them.",
        "Add --devices 8, or leave {one} out.",
    ),
    Combination(OFFLOADED_SHARDS, without(DEVICES), "SM245", "size {one} needs --devices"): (
        "The search for the fewest devices has all on the GPU.",
        "Add --devices 8, or leave {one} out.",
    ),
    Combination(
        CONTEXT, PARALLEL, "SM243", "size {other} with --context-parallel needs --devices", (without(DEVICES),)
    ): (
        "The fewest devices are looked for where ranks share no sequence.",
        "Add --devices {twice}, or leave {other} out.",
    ),
}
LARGEST: Table = {
    Combination(side("max_batch"), MAX_DIM, "SM199", "{one} and {other} are both given"): (
        "One search makes one size larger, and the others stay.",
        "Give one of them.",
    ),
    Combination((side("max_batch"), MAX_DIM), side("meter", "--meter live", ("live",)), "SM199"): (
        "What is the largest on a GPU is found by replays of the allocator.",
        "Leave --meter out.",
    ),
    Combination(
        side("max_dim", "--max-dim '{max_dim}'", lambda name: name != PROMPT.option),
        GENERATE,
        "SM111",
        "{one} with {other}",
    ): (
        "In generation the lengths are those of the prompt and of the new tokens, and a batch.",
        "Ask for --max-dim prompt.",
    ),
}
