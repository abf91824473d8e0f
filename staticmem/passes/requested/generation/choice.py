"""The choice of the next tokens from their logits.

Source: transformers 5.24, generation/utils.py, `_sample`; generation/logits_process.py, `TemperatureLogitsWarper`,
`TopKLogitsWarper`, `TopPLogitsWarper`. What their functions name is held until they return, the scores of a step until
the next step has its own.
"""

from __future__ import annotations

from staticmem.ir.graph import NO_KWARGS, Arg, Op, Ref
from staticmem.passes.requested.generation.draft import Draft
from staticmem.scenario.generation import Sampling


class Choice:
    """Adds the calls of one step to a draft."""

    def __init__(self, draft: Draft, step: str, sampling: Sampling | None) -> None:
        self.draft, self.step, self.sampling = draft, step, sampling

    def tokens(self, logits: str, before: str) -> str:
        """The names of the tokens [batch], or [batch, 1] as a view. `before` is the step before, or ""."""
        if self.sampling is None:
            return self._call("next_tokens", "aten::argmax", Ref(logits), -1)
        scores = self._processed(logits, self.sampling)
        self._let_go(before, "processed")
        probabilities = self._call("probabilities", "aten::softmax.int", Ref(scores), -1)
        self._let_go(before, "probabilities")
        sampled = self._call("sampled", "aten::multinomial", Ref(probabilities), 1)
        return self._call("next_tokens", "aten::squeeze.dim", Ref(sampled), 1)

    def _processed(self, logits: str, asked: Sampling) -> str:
        """The scores after all processors. Those between are let go of when the next ones exist; the logits stay."""
        scores = logits
        steps = [
            (self._warmed, asked.warm), (self._top_k, asked.top_k > 0), (self._top_p, asked.top_p < 1),
        ]  # fmt: skip
        left = sum(wanted for _, wanted in steps)
        for process, wanted in steps:
            if not wanted:
                continue
            left -= 1
            new = process(scores, "processed" if not left else f"scores.{left}")
            if scores != logits:
                self.draft.let_go((scores,))
            scores = new
        return scores

    def _warmed(self, scores: str, to: str) -> str:
        return self._call(to, "aten::div.Tensor", Ref(scores), 1.0)

    def _top_k(self, scores: str, to: str) -> str:
        assert self.sampling is not None
        values, indices = self._pair("top_k", "aten::topk", Ref(scores), self.sampling.top_k)
        self.draft.let_go((indices,))
        last = self._call("top_k.last", "aten::select.int", Ref(values), -1, -1)
        column = self._call("top_k.column", "aten::unsqueeze", Ref(last), -1)
        removed = self._call("top_k.removed", "aten::lt.Tensor", Ref(scores), Ref(column))
        self.draft.let_go((values, last, column))
        return self._filled(scores, removed, to)

    def _top_p(self, scores: str, to: str) -> str:
        values, indices = self._pair("top_p", "aten::sort", Ref(scores))
        softmax = self._call("top_p.softmax", "aten::softmax.int", Ref(values), -1)
        sums = self._call("top_p.sums", "aten::cumsum", Ref(softmax), -1)
        self.draft.let_go((softmax,))
        in_order = self._call("top_p.in_order", "aten::le.Scalar", Ref(sums), 0.1)
        args = (Ref(in_order), 1, Ref(indices), Ref(in_order))
        removed = self._call("top_p.removed", "aten::scatter.src", *args)
        filled = self._filled(scores, removed, to)
        self.draft.let_go((values, indices, sums, in_order))
        return filled

    def _filled(self, scores: str, removed: str, to: str) -> str:
        filled = self._call(to, "aten::masked_fill.Scalar", Ref(scores), Ref(removed), float("-inf"))
        self.draft.let_go((removed,))
        return filled

    def _call(self, part: str, target: str, *args: Arg) -> str:
        return self.draft.call(target, *args, to=f"{self.step}.{part}")

    def _pair(self, part: str, target: str, *args: Arg) -> tuple[str, str]:
        """A call with two results: values and indices."""
        names = f"{self.step}.{part}.values", f"{self.step}.{part}.indices"
        self.draft.ops.append(Op(f"{self.step}.{part}_", target, args, NO_KWARGS, names))
        return names

    def _let_go(self, before: str, part: str) -> None:
        """The variable has new scores, and lets go of those of the step before."""
        name = f"{before}.{part}"
        if before and any(name in op.outputs for op in self.draft.ops):
            self.draft.let_go((name,))
