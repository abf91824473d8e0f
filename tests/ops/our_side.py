"""What the rules say for a case, in the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from observe import Case, Observation, View

from staticmem.eager.autograd import Formula, Grads, run_backward
from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner, Storage, Tensor
from staticmem.engine.offloading import Offloading
from staticmem.ir import dtypes
from staticmem.ops import lookup
from staticmem.ops.dispatch import call
from staticmem.scenario.step import ON_GPU


class Run:
    def __init__(self, case: Case, pattern: Sequence[bool], above: int, offload: str = ON_GPU) -> None:
        self.case, self.pattern, self.above = case, pattern, above
        self.e = Eager(training=True)
        self.hooks = [Offloading(self.e, offload, ())] if offload != ON_GPU else []
        self.e.trace.begin("forward")
        self.labels: dict[int, str] = {}
        self.seen = Observation()

    def op(self, target: str, *args: Any, **kwargs: Any) -> Any:
        rule = lookup(target)
        assert rule is not None, f"no rule for {target}"
        return call(self.e, rule, args, kwargs)

    def source(self, index: int) -> Tensor:
        spec = self.case.flat[index]
        tensor = self.e.empty(spec.shape, spec.dtype, spec.layout)
        self.labels[tensor.storage.id] = f"in{index}"
        if self.pattern[index]:
            tensor.requires_grad = True
            self.seen.grads[f"in{index}"] = None

            def arrived(e: Eager, grads: Grads, need: Sequence[bool]) -> list[Tensor | None]:
                self.seen.grads[f"in{index}"] = None if grads[0] is None else self.view(grads[0])
                kept = Owner(Reason.OUTSIDE, "")
                for grad in grads:
                    if grad is not None:
                        e.hold(grad, kept)
                return [None]

            anchor = self.e.empty((), dtypes.float32)
            anchor.requires_grad = True
            self.e.hold(anchor, Owner(Reason.OUTSIDE, ""))
            self.e.record("Source", tensor, [anchor], [Formula((0,), arrived)])
            node = tensor.grad_fn
            assert node is not None
            node.sequence -= 1000  # after all else: gradients stay until the end
        self.e.hold(tensor, Owner(Reason.OUTSIDE, f"in{index}"))
        return tensor

    def label(self, storage: Storage) -> str:
        return "empty" if storage.nbytes == 0 else self.labels[storage.id]

    def view(self, tensor: Tensor) -> View:
        return View.of(self.label(tensor.storage), tensor.shape, tensor.strides, tensor.dtype.name)

    def log(self, first: int, prefix: str) -> list[tuple[int, int]]:
        """The steps since buffer `first`; only what was made since the program began counts as alive."""
        made = [b for b in self.e.trace.buffers[first:] if b.nbytes and b.id not in self.hidden]
        for buffer in made:
            self.labels.setdefault(buffer.id, f"{prefix}{made.index(buffer)}")
        counted = [b for b in self.e.trace.buffers[self.start :] if b.id not in self.hidden]
        big = [b for b in counted if b.nbytes > self.above]
        steps = []
        for buffer in made:
            if buffer.nbytes <= self.above:
                continue
            live = sum(b.nbytes for b in big if b.born <= buffer.born and (b.died is None or b.died > buffer.born))
            steps.append((buffer.nbytes, live))
        return steps

    def run(self) -> Observation:
        e, case, seen = self.e, self.case, self.seen
        flat = [self.source(k) for k in range(len(case.flat))]
        given = iter(flat)
        inputs = [tuple(next(given) for _ in s) if isinstance(s, tuple) else next(given) for s in case.inputs]
        self.start = len(e.trace.buffers)
        self.hidden: set[int] = set()
        e.autocast = dtypes.bfloat16 if case.autocast else None
        e.open_scope()
        e.saved_hooks.extend(self.hooks)
        result = case.program(self.op, *inputs)
        outputs = [result] if isinstance(result, Tensor) else list(result or ())
        program = Owner(Reason.OUTSIDE, "")
        for out in outputs:
            e.hold(out, program)
        e.close_scope()
        e.saved_hooks.clear()
        e.autocast = None
        e.release(e.autocast_owner)
        seen.forward = self.log(self.start, "new")
        seen.outputs = [self.view(t) for t in outputs]
        seen.saved = sorted(self.saved(outputs))
        e.grad_enabled = False
        self.backward(outputs, program)
        return seen

    def saved(self, outputs: Sequence[Tensor]) -> set[str]:
        stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
        found: set[str] = set()
        visited: set[int] = set()
        while stack:
            node = stack.pop()
            if id(node) in visited or node.name == "Source":
                continue
            visited.add(id(node))
            found |= {self.label(storage) for storage in node.saved}
            stack.extend(edge[0] for edge in node.edges if edge is not None)
        return found - {"empty"}

    def backward(self, outputs: Sequence[Tensor], program: Owner) -> None:
        e, case = self.e, self.case
        chosen = [k for k, t in enumerate(outputs) if t.grad_fn is not None and (case.roots is None or k in case.roots)]
        if not chosen:
            return
        e.trace.begin("backward")
        first = len(e.trace.buffers)
        join = e.empty((), dtypes.float32)
        held = Owner(Reason.OUTSIDE, "")
        e.hold(join, held)
        roots = []
        for k in chosen:
            out = outputs[k]
            if case.root == "expanded":
                scalar = e.empty((), out.dtype)
                root = e.alias(scalar, out.shape, (0,) * out.ndim)
            elif case.root == "contiguous":
                root = e.empty(out.shape, out.dtype)
            else:
                root = e.empty_like(out)
            self.labels[root.storage.id] = f"root{k}"
            e.hold(root, held)
            roots.append(root)
        self.hidden = {b.id for b in e.trace.buffers[first:]}
        first = len(e.trace.buffers)

        def start(e: Eager, grads: Grads, need: Sequence[bool]) -> list[Tensor | None]:
            return list(roots)

        e.grad_enabled = True
        e.record("Join", join, [outputs[k] for k in chosen], [Formula(tuple(range(len(chosen))), start)])
        e.grad_enabled = False
        e.release(program)
        grads: dict[int, Tensor] = {}
        unlabelled = _Labels(self, first)
        with unlabelled:
            run_backward(e, join, roots[0], grads)
        self.seen.backward = self.log(first, "back")


class _Labels:
    """Gives labels to buffers as they are made, for gradients that arrive during backward."""

    def __init__(self, run: Run, first: int) -> None:
        self.run, self.first = run, first

    def __enter__(self) -> None:
        labels, first, run = self.run.labels, self.first, self.run

        class Lazy(dict[int, str]):
            def __missing__(self, key: int) -> str:
                made = [b.id for b in run.e.trace.buffers[first:] if b.nbytes]
                return f"back{made.index(key)}"

        run.labels = Lazy(labels)

    def __exit__(self, *_: object) -> None:
        pass


def run(case: Case, pattern: Sequence[bool], above: int = 0, offload: str = ON_GPU) -> Observation:
    """The observation of a case in which the inputs of `pattern` need gradients, of buffers above so many bytes.
    `offload`: where saved tensors are."""
    return Run(case, pattern, above, offload).run()
