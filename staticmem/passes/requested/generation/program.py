"""The graph of one `model.generate`: what it does before, the prefill, the last decode step, and its choice of tokens.

Greedy decoding with a cache, as `model.generate(**inputs, do_sample=False, max_new_tokens=N)` runs it eagerly: the
caller holds the token ids and the attention mask, which has no padding. Source: transformers 5.23, generation/utils.py:
`generate`, `_prefill`, `_sample`, `prepare_inputs_for_generation`, `_update_model_kwargs_for_generation`.

The choice of tokens, sampled or greedy. Source: transformers 5.24, generation/utils.py, `_sample`;
generation/logits_process.py, `TemperatureLogitsWarper`, `TopKLogitsWarper`, `TopPLogitsWarper`. What their functions
name is held until they return, the scores of a step until the next step has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staticmem.ir import dtypes
from staticmem.ir.graph import NO_KWARGS, Arg, Generated, Graph, KeptTokens, Note, Op, Recorded, Ref, Value
from staticmem.passes.requested.generation.attention import (
    Attention,
    Lengths,
    attentions,
    not_recognised,
    refuse_other_mixing,
)
from staticmem.passes.requested.generation.caches import END, KEPT, GrowingOps, Held, Layer, add_mask, needs_mask
from staticmem.passes.requested.generation.forward import Forward, Inputs, Outputs, ids_of, with_batched_experts
from staticmem.passes.variables.policy import POLICIES
from staticmem.passes.variables.releases import ends_of_values
from staticmem.scenario.generation import Generation, Sampling


class Choice:
    """Adds the calls of one step to a draft."""

    def __init__(self, draft: GrowingOps, step: str, sampling: Sampling | None) -> None:
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
        steps = [(self._warmed, asked.warm), (self._top_k, asked.top_k > 0), (self._top_p, asked.top_p < 1)]
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


PADDING = "generate.attention_mask"  # the caller's: `model.generate(**inputs)`


def generated(prefill: Graph, decode: Graph, wide: Graph, asked: Generation) -> Graph:
    """The graph of all. The three graphs are the decoder, bound at the tokens of the prompt, at one token, and at a
    length beyond any window.

    Raises:
        ModelFileError: the inputs are not those of a decoder, or its attention is not recognised.
    """
    if not ids_of(prefill):
        raise not_recognised(
            "its inputs are not those of a decoder with its prompt alone",
            "Looked for token ids [batch, tokens], and besides for inputs named attention_mask and position_ids.",
        )
    calls, lengths = attentions(prefill, wide), Lengths(decode, wide)
    refuse_other_mixing(prefill, calls)
    if prefill.recorded is not None:
        return _Generate(prefill, decode, calls, lengths, asked).graph()
    # what the file does not say of its variables is decided for the decoder as it is, before calls stand between
    graphs = {}
    for policy in POLICIES:
        steps = [replace(step, recorded=_assumed(step, policy, calls)) for step in (prefill, decode)]
        graphs[policy] = _Generate(steps[0], steps[1], calls, lengths, asked).graph()
    graph = graphs["expected"]
    last_held = {policy: each.recorded.last_held for policy, each in graphs.items() if each.recorded is not None}
    assert graph.generated is not None
    return replace(graph, recorded=None, generated=replace(graph.generated, last_held=last_held))


def _assumed(graph: Graph, policy: str, calls: Sequence[Attention]) -> Recorded:
    """What a recording would say of variables, by a policy. Masks are held by the forward that makes them for its
    layers (transformers 5.24, models/llama/modeling_llama.py, `causal_mask`)."""
    ends = ends_of_values(graph, policy)
    masks = {call.mask for call in calls} if policy != "last-use" else set()
    for op in graph.ops:
        if not masks.isdisjoint(op.outputs) and op.modules:
            last = max(i for i, o in enumerate(graph.ops) if o.modules[: len(op.modules)] == op.modules)
            ends.update(dict.fromkeys(op.outputs, last))
    return Recorded(ends, (), (), (), {})


class _Generate:
    """Writes the calls of `generate` around two forwards."""

    def __init__(
        self, prefill: Graph, decode: Graph, calls: Sequence[Attention], lengths: Lengths, asked: Generation
    ) -> None:
        self.prefill, self.decode, self.calls, self.lengths, self.asked = prefill, decode, calls, lengths, asked
        self.layers = [Layer(number, call.window, asked) for number, call in enumerate(calls)]
        self.draft = GrowingOps()
        shape = prefill.inputs[0].shape
        assert shape is not None
        self.batch = shape[0]

    def graph(self) -> Graph:
        """The graph, whose output is the token ids with those that are new."""
        draft, prefill = self.draft, self.prefill
        ids = prefill.inputs[0].name
        positions = draft.call("aten::cumsum", Ref(PADDING), -1, to="generate.position_ids")
        unfinished = draft.call("aten::ones", (self.batch,), to="generate.unfinished", kwargs={"dtype": dtypes.int64})
        given = draft.call("aten::clone", Ref(ids), to="generate.input_ids")
        masks = self._masks_before(self.asked.prompt, "prefill")
        first = Forward(draft, prefill, self.calls, self.layers, self.lengths, Inputs(given, positions, masks))
        outputs = first.run(())
        draft.let_go((given, *masks.values()))
        held = outputs.caches
        final = self._choose("prefill", outputs, ids, positions, unfinished, "")
        decode_at = len(draft.ops)
        if self.asked.steps:
            final, held = self._last_step(outputs)
        kept = tuple(
            KeptTokens(one.key.removesuffix(KEPT), one.value.removesuffix(KEPT), layer.tokens)
            for one, layer in zip(held, self.layers, strict=True)
        )
        return self._graph(final, Generated(decode_at, kept), outputs.all_logits)

    def _choose(self, step: str, outputs: Outputs, ids: str, positions: str, unfinished: str, before: str) -> str:
        """The next token, from the logits; the ids with it. `before` are the logits of the step before: a variable has
        them until the new ones exist."""
        draft, batch = self.draft, self.batch

        def call(part: str, target: str, *args: object, **kwargs: object) -> str:
            return draft.call(target, *args, to=f"{step}.{part}", kwargs=kwargs)  # type: ignore[arg-type]

        last = call("last_position", "aten::slice.Tensor", Ref(positions), 1, -1, END)
        by_one = call("step", "aten::add.Tensor", Ref(last), 0)
        following = call("next_position", "aten::add.Tensor", Ref(by_one), 1)
        draft.let_go((by_one, last))
        call("position_ids", "aten::cat", (Ref(positions), Ref(following)), -1)
        draft.let_go((following, *((positions,) if before else ())))
        logits = call("last_logits", "aten::select.int", Ref(outputs.logits), 1, -1)
        scores = call("scores", "staticmem::next_token_logits", Ref(logits))
        draft.let_go((before,) if before else ())
        tokens = Choice(draft, step, self.asked.sampling).tokens(scores, before.partition(".")[0])
        column = call("next_column", "aten::unsqueeze", Ref(tokens), 1)
        longer = call("input_ids", "aten::cat", (Ref(ids), Ref(column)), -1)
        draft.let_go((ids,) if before else ())
        done = [call(part, "aten::full", (batch,), False, dtype=dtypes.bool_) for part in ("no", "done")]
        either = call("is_done", "aten::bitwise_or.Tensor", *map(Ref, done))
        draft.let_go(done)
        others = call("not_done", "aten::bitwise_not", Ref(either))
        draft.let_go((either,))
        call("unfinished", "aten::bitwise_and.Tensor", Ref(unfinished), Ref(others))
        draft.let_go((others, unfinished))
        most = call("any_unfinished", "aten::max", Ref(f"{step}.unfinished"))
        stops = call("stops", "aten::eq.Scalar", Ref(most), 0)
        draft.let_go((most, stops, logits, outputs.logits))  # `del outputs`
        return longer

    def _last_step(self, outputs: Outputs) -> tuple[str, tuple[Held, ...]]:
        """The last decode step. The positions of the prompt stay with a variable of `generate`. Of the steps between,
        what they leave is made at once."""
        draft, batch, length = self.draft, self.batch, self.asked.longest
        ids, positions = "prefill.input_ids", "prefill.position_ids"
        caches = [layer.grow(draft, held) for layer, held in zip(self.layers, outputs.caches, strict=True)]
        if self.asked.steps > 1:
            grown = []
            for name in (ids, positions):
                kwargs = {"dtype": dtypes.int64}
                grown.append(draft.call("aten::zeros", (batch, length), to=f"{name}.grown", kwargs=kwargs))
                draft.let_go((name,))
            ids, positions = grown
        last = [
            draft.call("aten::slice.Tensor", Ref(name), 1, -1, END, to=f"decode.{part}.last")
            for part, name in (("input_ids", ids), ("position_ids", positions))
        ]
        given = draft.call("aten::clone", Ref(last[0]), to="decode.input_ids.given")
        at = draft.call("aten::clone", Ref(last[1]), to="decode.position_ids.given")
        draft.let_go(last)
        masks = self._masks_before(1, "decode")
        decode = with_batched_experts(self.decode)
        forward = Forward(draft, decode, self.calls, self.layers, self.lengths, Inputs(given, at, masks), "decode.")
        done = forward.run(caches)
        final = self._choose("decode", done, ids, positions, "prefill.unfinished", "prefill.scores")
        return final, done.caches

    def _masks_before(self, queries: int, step: str) -> dict[int | None, str]:
        """The masks that `prepare_inputs_for_generation` makes for a static cache, one for each window."""
        parts: dict[int | None, tuple[str, ...]] = {}
        prefill = step == "prefill"
        for call, layer in zip(self.calls, self.layers, strict=True):
            if layer.static and layer.window not in parts and needs_mask(call, layer, queries, prefill):
                name = f"{step}.mask.{len(parts)}"
                parts[layer.window] = add_mask(self.draft, name, call, layer, queries, self.batch, (), prefill)
        masks: dict[int | None, str] = {}
        for window, (mask, *viewed) in parts.items():
            masks[window] = mask
            if viewed:
                masks[window] = self.draft.call("aten::contiguous", Ref(mask), to=f"{mask}.contiguous")
                self.draft.let_go((mask, *viewed))
        return masks

    def _graph(self, final: str, parts: Generated, all_logits: bool) -> Graph:
        prefill, decode, draft = self.prefill, self.decode, self.draft
        assert prefill.recorded is not None
        functions = {**prefill.recorded.functions}
        recorded = Recorded(draft.last_held(), (), prefill.recorded.kept, (), functions)
        shape = (self.batch, self.asked.prompt)
        padding = Value(PADDING, dtypes.int64, shape)
        values = {
            **{f"decode.{name}": replace(value, name=f"decode.{name}") for name, value in decode.values.items()},
            **prefill.values,
        }
        return replace(
            prefill,
            inputs=(prefill.inputs[0], padding),
            ops=tuple(draft.ops),
            outputs=(final,),
            values=values,
            output_names=(),
            recorded=recorded,
            programs=None,
            generated=parts,
            notes=(*prefill.notes, *_notes(self.asked, all_logits)),
        )


def _notes(asked: Generation, all_logits: bool) -> list[Note]:
    how = "greedy decoding without padding, as model.generate(**inputs, do_sample=False)"
    if asked.sampling is not None:
        how = f"sampling without padding, as model.generate(**inputs, do_sample=True, {asked.sampling})"
    text = (
        f"{how} of transformers 5 runs it eagerly; servers with paged attention (vLLM and others) allocate their cache "
        "in advance and need other sums"
    )
    notes = [Note("assumption", "SM278", text)]
    if asked.steps > 1:
        text = (
            f"of the {asked.steps:,} decode steps the last one is run, which needs the most; reserved memory is "
            "without what the growth of the cache scatters, and bands allow 1 MiB more for each block of the cache"
        )
        if asked.cache == "static":
            text = f"of the {asked.steps:,} decode steps the last one is run: all need the same"
        notes.append(Note("assumption", "SM279", text))
    if all_logits:
        text = "the graph does not slice the hidden states for logits_to_keep: logits of all positions are computed"
        notes.append(Note("assumption", "SM280", text))
    return notes
