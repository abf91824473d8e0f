"""Steps of a graph with PyTorch: loss, backward and optimizer as `analyze` takes them, on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it

from staticmem.engine.losses import target_of, terms_over
from staticmem.ir.graph import Graph
from staticmem.ops import kinds_of
from staticmem.scenario.losses import has_terms
from staticmem.scenario.optimizers import TORCH_OPTIMIZERS
from staticmem.scenario.step import FIRST, HELD, Scenario
from staticmem.validate.pytorch.program import NotRunnableError, Program, torch_dtype

TARGET = "target"
_LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "cross-entropy": F.cross_entropy, "mse": F.mse_loss, "l1": F.l1_loss, "smooth-l1": F.smooth_l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
}  # fmt: skip
_LEARNING_RATE = 1e-6  # values stay finite over a few steps; memory does not depend on it


def _norm_in_eval(args: list[Any], kwargs: dict[str, Any]) -> None:
    """`model.eval()`: running statistics where there are any (also of an export in training mode)."""
    if args[3] is not None:
        args[5] = False


def _dropout_in_eval(args: list[Any], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _attention_in_eval(args: list[Any], kwargs: dict[str, Any]) -> None:
    if len(args) > 4:
        args[4] = 0.0
    elif "dropout_p" in kwargs:
        kwargs["dropout_p"] = 0.0


def _in_evaluation(graph: Graph) -> dict[str, Callable[[list[Any], dict[str, Any]], Any]]:
    """What runs in place of ops that have another form in evaluation."""
    dropouts = {base for base in graph.bases if "dropout" in kinds_of(base)} - {"aten::native_dropout"}
    return {
        "aten::batch_norm": _norm_in_eval,
        "aten::native_batch_norm": _norm_in_eval,
        "aten::scaled_dot_product_attention": _attention_in_eval,
        **dict.fromkeys(dropouts, _dropout_in_eval),
    }


class Steps:
    """A model, its loss and its optimizer, run step by step.

    `phase` is told what begins: "forward", "backward", "optimizer".
    """

    def __init__(self, graph: Graph, scenario: Scenario, loss: str | None, device: str) -> None:
        self.scenario, self.loss_name, self.device = scenario, loss, device
        dtype = torch_dtype(scenario.dtype) if scenario.dtype is not None else None
        self.program = Program(graph, device, dtype)
        self.phase: Callable[[str], None] = lambda name: None
        self.before_step: Callable[[], None] = lambda: None
        self.stand_ins: dict[str, int] = {}
        self.optimizer: Any = None
        self.terms = terms_over(graph, loss) if loss is not None and has_terms(loss) else ()
        self.targets: dict[str, Any] = {}
        self.loss: Any = None
        self.trained_inputs: list[Any] = []
        self.outputs: Any = None
        if not scenario.training:
            self.program.stand_ins = _in_evaluation(graph)
        elif device == "cpu":
            self.program.stand_ins = {"aten::dropout": self._dropout}
        if device == "cpu" and any(op.base == "aten::scaled_dot_product_attention" for op in graph.ops):
            self.stand_ins["attention"] = 1

    def place(self) -> None:
        """Model and inputs on the device."""
        self.program.place()
        names = [value.name for value in self.program.graph.inputs]
        wanted = names if "all" in self.scenario.input_grad else self.scenario.input_grad
        placed = [self.program.placed[name] for name in names if name in wanted]
        self.trained_inputs = [tensor.requires_grad_() for tensor in placed if tensor.is_floating_point()]

    def place_target(self, shape: Sequence[int]) -> None:
        """The target of the loss for an output of this shape: class 0 or zeros everywhere."""
        wanted = target_of(self.loss_name or "mean", tuple(shape)) if self.scenario.training else None
        if wanted is not None:
            self.targets[TARGET] = torch.zeros(wanted[0], dtype=torch_dtype(wanted[1]), device=self.device)
        for target in filter(None, [one.target for one in self.terms]):
            if target.is_input:
                self.targets[target.name] = self.program.placed[target.name]
            elif target.name not in self.targets:
                dtype = torch_dtype(target.dtype)
                self.targets[target.name] = torch.zeros(target.shape, dtype=dtype, device=self.device)

    def make_optimizer(self) -> None:
        """The optimizer over the parameters that some op reads and that are trained; None where none was asked for."""
        name, s = self.scenario.optimizer, self.scenario
        if name is None:
            return
        program = self.program
        read = {id(program.placed[p]) for p in program.placed if p in program.read}
        trained = [p for p in program.parameters if p.requires_grad and id(p) in read]
        options: dict[str, Any] = {"lr": _LEARNING_RATE}
        if s.weight_decay:
            options["weight_decay"] = s.weight_decay
        if name in ("sgd", "rmsprop"):
            options["momentum"] = s.momentum
        for key in ("nesterov", "dampening", "amsgrad", "centered"):
            if getattr(s, key):
                options[key] = getattr(s, key)
        if s.optimizer_impl == "fused":
            options["fused"] = True
        elif name != "adafactor":
            options["foreach"] = s.optimizer_impl == "foreach"
        self.optimizer = getattr(torch.optim, TORCH_OPTIMIZERS[name])(trained, **options)

    def counters(self) -> list[Any]:
        """Numbers in the optimizer's state that are the CPU's beside a GPU: all but those of fused optimizers."""
        if self.optimizer is None or self.scenario.optimizer_impl == "fused":
            return []
        states = (tensor for state in self.optimizer.state.values() for tensor in state.items())
        return [t for key, t in states if key in ("step", "mu_product") and isinstance(t, torch.Tensor)]

    def step(self) -> None:
        """A training step, or an inference."""
        with self._attention():
            if self.scenario.training:
                self._train()
            else:
                self._infer()

    def _infer(self) -> None:
        self.before_step()
        self.phase("forward")
        with torch.no_grad(), self._autocast():
            outputs = self.program.forward()
            if self.scenario.outputs == HELD:
                self.outputs = outputs
        self.phase("end")
        del outputs

    def _train(self) -> None:
        s = self.scenario
        if s.zero_grad == FIRST:
            self._zero_grad()
        self.before_step()
        for micro_batch in range(s.accumulate):
            self.phase("forward")
            with self._autocast():
                outputs = self.program.forward()
                if s.outputs == HELD:
                    self.outputs = outputs
                self.loss = self._summed(outputs) if self.terms else self._loss(self.loss_name, outputs[0], TARGET)
                del outputs
            if s.backward:
                self.phase("backward")
            if s.zero_grad != FIRST and not micro_batch:  # the forward has ended with the gradients of before
                self._zero_grad()
            if s.backward:
                self._backward()
            if s.retain_graph or not s.backward:  # the graph ends with the function that has called the backward
                self.loss, self.outputs = self.loss.detach(), None
        self.phase("optimizer")
        if s.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_([p for p in self.program.parameters if p.grad is not None], 1.0)
        if self.optimizer is not None:
            self.optimizer.step()
        self.phase("end")

    def _backward(self) -> None:
        if self.loss.requires_grad:
            self.loss.backward(retain_graph=self.scenario.retain_graph)

    def _zero_grad(self) -> None:
        for p in (*self.program.parameters, *self.trained_inputs):
            if self.scenario.set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def _summed(self, outputs: Sequence[Any]) -> Any:
        """A loss over several outputs."""
        names, total = self.program.graph.outputs, None
        for one in self.terms:
            output = outputs[names.index(one.value)]
            loss = self._loss(one.term.kind, output, one.target.name if one.target is not None else TARGET)
            if one.term.weight:
                loss = float(one.term.weight) * loss
            total = loss if total is None else total + loss
            del loss
        return total

    def _loss(self, kind: str | None, output: Any, target: str) -> Any:
        if kind == "mean":
            return output.mean()
        if kind == "sum":
            return output.sum()
        if kind == "outputs":
            raise NotRunnableError("--loss outputs has its own gradients for the outputs, and no loss to run")
        if kind == "cross-entropy" and output.ndim == 3:
            return F.cross_entropy(output.flatten(0, 1), self.targets[target].flatten())
        if kind in _LOSSES:
            return _LOSSES[kind](output, self.targets[target])
        if output.numel() != 1:
            raise NotRunnableError(f"--loss none takes the output as the loss, and it has {output.numel()} elements")
        return output

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        amp = self.scenario.amp
        if amp is None:
            yield
            return
        with torch.autocast(self.device, torch_dtype(amp)):
            yield

    @contextlib.contextmanager
    def _attention(self) -> Iterator[None]:
        """The kernel of attention: on the CPU the one that both devices have."""
        kernel = "math" if self.device == "cpu" else self.scenario.sdpa
        if kernel == "auto":
            yield
            return
        from torch.nn.attention import SDPBackend, sdpa_kernel

        names = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
        with sdpa_kernel(getattr(SDPBackend, names.get(kernel, "MATH"))):
            yield

    def _dropout(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """`aten::dropout` as CUDA runs it (aten/src/ATen/native/Dropout.cpp, `is_fused_kernel_acceptable`)."""
        x, p, train = (*args, *kwargs.values())[:3]
        if not train or not 0 < p < 1 or not x.numel():
            return None
        self.stand_ins["dropout"] = self.stand_ins.get("dropout", 0) + 1
        return torch.ops.aten.native_dropout.default(x, p, True)[0]
