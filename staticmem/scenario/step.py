"""`Scenario`: what one step does, and `Loop`: what its training loop does. Sizes of inputs are bound before it."""

from __future__ import annotations

from dataclasses import field

from staticmem.ir.dtypes import DType
from staticmem.ir.record import record
from staticmem.scenario.adapters import Lora, Quantized
from staticmem.scenario.checkpointing import Checkpointing
from staticmem.scenario.compiling import WHOLE, CompileOptions
from staticmem.scenario.edits import Edits
from staticmem.scenario.generation import Generation
from staticmem.scenario.losses import LossOptions
from staticmem.scenario.optimizers import TORCHAO, LowRank, OptimizerOptions
from staticmem.scenario.options import BACKWARD, LEVERS, UPDATED, at_least_one, option
from staticmem.scenario.strategies import ContextShare, ExpertShare
from staticmem.version import REFERENCE_RELEASE

# bytes of the buckets that DistributedDataParallel reduces at a time: the first, and others (`bucket_cap_mb` 25 of
# torch/nn/parallel/distributed.py; kDefaultFirstBucketBytes of torch/csrc/distributed/c10d/reducer.hpp)
DDP_FIRST_BUCKET, DDP_BUCKET = 1 << 20, 25 << 20
FIRST, AFTER_FORWARD = "first", "after-forward"  # when zero_grad() of a step runs
# where tensors that autograd saves are: on the GPU; on the CPU, by torch.autograd.graph.save_on_cpu (in pageable or in
# pinned memory), or by torchtune's OffloadActivations (with or without streams)
ON_GPU, PAGEABLE, PINNED, STREAMS, TORCHTUNE = "none", "save-on-cpu", "pinned", "torchtune", "torchtune-no-streams"
OFFLOADS = (ON_GPU, PAGEABLE, PINNED, STREAMS, TORCHTUNE)
HELD, DROPPED = "held", "dropped"  # what the loop does with the model's outputs once it has the loss, or their use


# fmt: off
@record(frozen=True, kw_only=True)
class Loop:
    """What the training loop does around the step (docs/levers.md). The defaults are PyTorch's."""

    accumulate: int = option(
        1, LEVERS, "whole", "N", "micro-batches a step; the batch is the size of one", example="4", needs=BACKWARD,
    )
    offload_activations: str = option(
        ON_GPU, LEVERS, "choice", "WORD", "what autograd saves in the forward of the model is on the CPU",
        choices=OFFLOADS, example=PINNED,
        details="[Saved tensors on the CPU](levers.md#saved-tensors-on-the-cpu)",
    )
    grad_scaler: bool = option(False, LEVERS, "switch", "", "torch.amp.GradScaler around loss and step")
    set_to_none: bool = option(
        True, LEVERS, "switch", "", "zero_grad(set_to_none=True); else gradients stay, zeroed, through the forward",
        needs=BACKWARD,
    )
    zero_grad: str = option(
        FIRST, LEVERS, "choice", "WORD", "when zero_grad() of a step runs: before its forward, or after it",
        choices=(FIRST, AFTER_FORWARD), example=AFTER_FORWARD, needs=BACKWARD,
        details="`after-forward` is Lightning's",
    )
    clip_grad_norm: bool = option(
        False, LEVERS, "switch", "", "torch.nn.utils.clip_grad_norm_ before the step", needs=UPDATED,
    )
    input_grad: str | tuple[str, ...] = option(
        (), LEVERS, "names", "NAME|all", "inputs that require a gradient, by name; all: every floating-point one",
        example="[x]", details="As `x.requires_grad_()`",
    )
    retain_graph: bool = option(
        False, LEVERS, "switch", "", "backward(retain_graph=True): what it reads stays until it returns",
        needs=BACKWARD,
    )
    backward: bool = option(
        True, LEVERS, "switch", "", "the backward runs; otherwise only the forward, which keeps what a backward reads",
    )
    outputs: str = option(
        HELD, LEVERS, "choice", "WORD", "whether the loop holds the model's outputs until the next forward returns",
        choices=(HELD, DROPPED), example=DROPPED, training=False, needs="",
        details="`dropped` as with trainers ([levers](levers.md#outputs-of-the-model))",
    )
    float32_outputs: bool = option(
        False, LEVERS, "switch", "", "outputs come back from autocast in float32, as from accelerate's prepare()",
        needs="", details="With `amp` ([levers](levers.md#outputs-in-float32))",
    )
    # fmt: on

    def check(self) -> None:
        """Raises:
        UsageError: there is no micro-batch.
        """
        if self.accumulate < 1:
            raise at_least_one("accumulate", self.accumulate, "Micro-batches a step")


@record(frozen=True, kw_only=True)
class Scenario(OptimizerOptions, LossOptions, CompileOptions, Checkpointing, Edits, Loop):
    """One configuration: groups of options as the step has them, and what others became.

    `dtype` casts the whole model; `amp` runs the forward under `torch.autocast("cuda")`.

    `sdpa` is the kernel of scaled_dot_product_attention; "auto" chooses as PyTorch does on an sm_90 device.

    `compile` has the modules that run under torch.compile, by class or path, or `WHOLE`; `compile_mode` is its mode.

    `ddp`: DistributedDataParallel is around the model, which decides where compiled code is cut.

    `target_length`: labels of a target of `ctc`; None: as many as the output has frames.

    `low_rank`: what the optimizers of `LOW_RANK` are asked; they need it.

    `experts`: the share of one rank of expert parallelism; `context`: that of one rank of context parallelism.

    `torch` is the release of PyTorch that runs the step: what autograd saves and which calls there are.

    `runs_triton`: code of `torch.compile` runs in the step, that of the model or that of an optimizer's update.

    `optimizer_impl` "foreach" is an optimizer's default on CUDA: Adafactor's is its for-loop, the 8-bit ones are fused.
    """

    mode: str = "infer"
    loss: str = "auto"
    dtype: DType | None = None
    amp: DType | None = None
    sdpa: str = "auto"
    torch: tuple[int, int] = REFERENCE_RELEASE
    compile: tuple[str, ...] = ()
    lora: Lora | None = None
    quantize: Quantized | None = None
    generation: Generation | None = None
    ddp: bool = False
    low_rank: LowRank | None = None
    experts: ExpertShare | None = None
    context: ContextShare | None = None
    runs_triton: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        of_optimizer = self.compile_optimizer or self.optimizer in TORCHAO  # whose update torchao compiles
        object.__setattr__(self, "runs_triton", bool(self.compile) or of_optimizer)

    @property
    def gradients_at_start(self) -> bool:
        """Whether gradients of the step before are there when the forward runs. Those of CUDA graphs are not, whenever
        zero_grad() runs: the forward takes their memory."""
        graphs = self.cuda_graphs and WHOLE in self.compile
        return not self.set_to_none or (self.zero_grad == AFTER_FORWARD and not graphs)

    @property
    def training(self) -> bool:
        return self.mode == "train"
