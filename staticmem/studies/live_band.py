"""The band of the live peak: what a file without a recording leaves open, and by how much that moves the peak.

Each unknown has a least and a most: what ran in place (`passes.restoring.inplace`), which values variables hold
(`passes.variables`), what custom functions, checkpoints and lost calls of `detach` do to autograd
(`passes.restoring.custom_functions`), which dtypes code takes from tensors under autocast
(`passes.restoring.upcasts`), what an exporter stored or merged (`stored_tensors`), and what is trained and
checkpointed (`unsaid_training`). The step runs again with the least of all, and with the most of all. Ops without a
rule widen the band of any file, one with a recording too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import Protocol, TypeVar

from staticmem.compiler.plan import Kernels
from staticmem.engine.step import StepResult, run_step
from staticmem.errors import StaticmemError
from staticmem.ir.graph import Graph, Note
from staticmem.ir.model_file import Binding, ModelFile
from staticmem.liveness import Lifetimes
from staticmem.passes import pipeline
from staticmem.passes.pipeline import Pass
from staticmem.passes.requested.regions import has_open_regions
from staticmem.passes.restoring.inplace import ops_left_open
from staticmem.passes.variables.releases import kept_by_modules, releases_of
from staticmem.scenario.compiling import AUTOTUNED, WHOLE
from staticmem.scenario.request import Request
from staticmem.scenario.step import Scenario
from staticmem.studies.steps import JUDGED, Step, step_of
from staticmem.studies.stored_tensors import moved_by_kept_tensors, moved_by_stored_tensors
from staticmem.studies.unsaid_training import least_of_training, least_on_fused_path

PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
OTHER_KERNELS: tuple[Kernels, ...] = ("apart", "fresh")  # of compiled code, where the expected ones are not sure
BAND_LIMIT = 50_000  # ops; beyond it the band would take two further runs of a large step

Made = TypeVar("Made")
Question = Callable[[Graph, Scenario], "tuple[Graph, Graph] | None"]


def moved_by_unknown_ops(result: StepResult) -> tuple[int, int]:
    """Bytes by which the peak may be lower, and higher, where ops have no rule.

    Where autograd makes a node of such an op, it is taken to save what it reads and makes (`ops.dispatch.fallback`),
    and to make gradients. It may save nothing of it and pass its gradient on. And its kernels may save factors of their
    own and hold temporaries, each as large as its results, and in the backward as what it reads: those of torch.linalg
    and of reductions by indices do (torch/csrc/autograd/FunctionsManual.cpp).
    """
    kept = sum(result.unknown_kept.values())
    return kept, 2 * sum(result.unknown_bytes.values()) + kept


def questions(scenario: Scenario) -> tuple[Question, ...]:
    """What passes leave open beside what runs in place: each gives the graphs with the least and the most of it, or
    None where a graph leaves nothing open."""
    from staticmem.passes.restoring.custom_functions import ends_of_functions
    from staticmem.passes.restoring.module_calls import ends_of_loops

    if scenario.amp is None and scenario.dtype is None:
        return ends_of_functions, ends_of_loops
    from staticmem.passes.restoring.upcasts import ends_of_cast, ends_under_autocast

    return ends_of_functions, ends_under_autocast, ends_of_cast, ends_of_loops


class HasResult(Protocol):
    """A study of a step of one device."""

    @property
    def result(self) -> StepResult: ...


class LiveBand:
    """What the file leaves open in a step that has been run.

    `rank` makes the step of one rank of `request`'s, the step of one device: of a rank, only compiled code is open, and
    the load of experts, which `heaviest` has at its worst. `fewest` has sizes that are in the data, which are expected
    as large as they can get, as small as they may be (SM326).
    """

    def __init__(
        self,
        model: ModelFile,
        binding: Binding,
        graph: Graph,
        request: Request,
        step: Step,
        rank: Callable[[StepResult], StepResult] | None = None,
        heaviest: HasResult | None = None,
        fewest: HasResult | None = None,
    ) -> None:
        self.rank, self.heaviest, self.fewest = rank, heaviest, fewest
        self.model, self.binding, self.graph, self.request = model, binding, graph, request
        self.scenario = request.scenario()[0]
        self.result, self.lifetimes = step
        self.left_out: list[Note] = []  # what the band lacks, once it is known

    @cached_property
    def bounds(self) -> tuple[int, int] | None:
        """The least and the most that the peak can be; None where nothing that is open moves it, or nothing is."""
        if self.heaviest is not None:
            peak, most = self.lifetimes.peak_bytes, self._peak(self.heaviest.result)
            return (peak, most) if most > peak else None
        of_rank = self.rank is not None and self.result.compiled is None
        if len(self.graph.ops) > BAND_LIMIT or (of_rank and not self._steps_besides):
            return None
        graph, peak = self.graph, self.lifetimes.peak_bytes
        peaks = [peak, *(step.peak_bytes for step in self._steps_besides)]
        low, high = min(peaks), max(peaks)
        if self._is_open:
            less, more = moved_by_stored_tensors(graph, self.result.trace)
            kept = moved_by_kept_tensors(graph, self.lifetimes, self.scenario.training)
            low, high = low - less - kept[0], high + more + kept[1]
            high += self._moved_by_folded_norms()
        if self.result.compiled is not None:
            low, high = self._ends_of_compiled(low, high)
        unknown = moved_by_unknown_ops(self.result)
        low, high = max(low - unknown[0], 0), high + unknown[1]
        return (low, high) if low < high else None

    @property
    def ends(self) -> tuple[Lifetimes, ...] | None:
        """The steps whose peaks, with the expected one, are the bounds; None where more than that moves them."""
        steps = self._steps_besides if len(self.graph.ops) <= BAND_LIMIT else ()
        peaks = [self.lifetimes.peak_bytes, *(step.peak_bytes for step in steps)]
        bounds = self.bounds or (self.lifetimes.peak_bytes,) * 2
        return steps if bounds == (min(peaks), max(peaks)) else None

    @cached_property
    def _steps_besides(self) -> tuple[Lifetimes, ...]:
        """The steps that the band has besides the expected one."""
        steps = [self.other_call]
        if self.fewest is not None:
            steps.append(self._evaluated("small sizes that are in the data", self._step_of_fewest))
        if self._is_open:
            least = least_of_training(self.graph, self.scenario, self.lifetimes)
            if not self.scenario.training:
                least = least_on_fused_path(self.result.notes, self.lifetimes)
            steps += [*self._open_steps, least]
        return tuple(filter(None, steps))

    @cached_property
    def other_call(self) -> Lifetimes | None:
        """The step of another call of the code of a recording, where its calls differ."""
        recorded = self.graph.recorded
        if recorded is None or recorded.other_call is None:
            return None
        result = step_of(self.model, recorded.other_call, self.scenario)[0]
        return Lifetimes(result.trace if self.rank is None else self.rank(result).trace)

    @property
    def _is_open(self) -> bool:
        """Nothing of what a step may do otherwise is open in a recording, nor in compiled code, which decides by itself
        what lives how long."""
        return self.graph.recorded is None and WHOLE not in self.scenario.compile and self.rank is None

    def _ends_of_compiled(self, low: int, high: int) -> tuple[int, int]:
        """Bounds where the compiled code of some ops cannot be predicted, or not what it makes of an op: nothing
        saved of them or the step eager;
        where Inductor pads or divides every matrix product that it may; where templates have in them all that they can;
        and where it makes other kernels of a training step: none
        fused, or besides none that writes over what dies in it. The expected ones are right for most steps
        (docs/accuracy.md)."""
        compiled = self.result.compiled
        assert compiled is not None
        buffers, kernels, lifetimes = self.result.trace.buffers, self.result.trace.kernels, self.lifetimes
        if self.scenario.training:
            for other in OTHER_KERNELS:
                peak = self._peak(run_step(self.graph, self.scenario, kernels=other))
                low, high = min(low, peak), max(high, peak)
        if self.scenario.compile_mode in AUTOTUNED:
            low = min(low, self._peak(run_step(self.graph, self.scenario, kernels="templates")))
        if compiled.padded:
            for kernel, born in zip(buffers.kernels, buffers.born, strict=True):
                if kernel >= 0 and kernels.names[kernel] in PRODUCTS:
                    high = max(high, int(lifetimes.live[born]) + compiled.padded.get(kernels.ops[kernel], 0))
        if compiled.unpredicted or compiled.as_eager:
            unknown = {("activation", op) for op in (*compiled.unpredicted, *compiled.as_eager)}
            unknown.update(("temporary", op) for op in compiled.as_eager)  # their backward is other calls
            alive = lifetimes.alive_ids(lifetimes.peak_tick)
            of_op = {id: (buffers.categories[id], kernels.ops[buffers.kernels[id]]) for id in alive}
            low -= sum(lifetimes.sizes[id] for id in alive if of_op[id] in unknown)
            eager = step_of(self.model, self.graph, replace(self.scenario, compile=()))[0]
            high = max(high, self._peak(eager))
        return low, high

    def _evaluated(self, bound: str, make: Callable[[], Made]) -> Made | None:
        """What is made of the graph of a bound; None, and a note, where that graph does not evaluate. The expected step
        has run, so that a bound never refuses the file."""
        try:
            return make()
        except StaticmemError as error:
            if error.code not in JUDGED:
                raise
            text = f"the band of the peak lacks {bound}, because the graph of that did not evaluate: {error.what}"
            self.left_out.append(Note("warning", "SM381", text))
            return None

    def _step_of_fewest(self) -> Lifetimes:
        assert self.fewest is not None
        result = self.fewest.result
        return Lifetimes(result.trace if self.rank is None else self.rank(result).trace)

    def _peak(self, result: StepResult) -> int:
        """The peak of a step, of one rank where the request is parallel."""
        return Lifetimes(result.trace if self.rank is None else self.rank(result).trace).peak_bytes

    def _moved_by_folded_norms(self) -> int:
        """Bytes by which the peak of training is higher if the export folded a batch norm into every convolution with
        a bias, where the file looks so (SM261)."""
        suspected = any(note.code == "SM261" for note in self.graph.notes)
        if not suspected or not self.scenario.training or self.request.unfold_batchnorm:
            return 0
        bound = pipeline.bind(self.model, self.binding)

        def unfolded() -> Step:
            scenario = replace(self.scenario, inplace_activations="least", unfold_batchnorm=True)
            graph = pipeline.for_step(bound, scenario, pipeline.STEP)
            return step_of(self.model, graph, self.scenario, "expected")

        step = self._evaluated("batch norms that the export may have folded", unfolded)
        return 0 if step is None else max(step[1].peak_bytes - self.lifetimes.peak_bytes, 0)

    @cached_property
    def _open_steps(self) -> tuple[Lifetimes, ...]:
        """The steps with the least, and with the most, that the code may do with its values; none where that does not
        move the peak."""
        graph, scenario = self.graph, self.scenario
        open_questions = [question for question in questions(scenario) if question(graph, scenario) is not None]
        every = scenario.training and (
            bool(open_questions)
            or has_open_regions(graph, scenario.amp is not None)
            or kept_by_modules(graph) != kept_by_modules(graph, "last-use")
        )
        if scenario.training and not every and not self._forward_matters():
            return ()
        ends = self.ends_of_inplace or (graph, graph)
        for question in open_questions:
            least, most = (question(end, scenario) or question(graph, scenario) for end in ends)
            assert least is not None
            assert most is not None
            ends = least[0], most[1]
        early = every or (scenario.training and self._may_release_early()) or self._holds_otherwise("last-use")
        late = every or self._holds_otherwise("most")
        policies = ["last-use" if early else "expected", "most" if late else "expected"]
        if policies == ["expected", "expected"] and ends[0] is ends[1]:
            return ()
        runs = zip(("its lower end", "its upper end"), ends, policies, strict=True)
        steps = [self._evaluated(name, partial(step_of, self.model, end, scenario, to)) for name, end, to in runs]
        return tuple([step[1] for step in steps if step is not None])

    def _holds_otherwise(self, policy: str) -> bool:
        """Whether a policy of `variables.policy` lets variables hold something else than the expected one."""
        asked, expected = (releases_of(self.graph, p, self.scenario.training) for p in (policy, "expected"))
        parts = ("last_use", "frames", "attributes")
        return any(getattr(asked, part) != getattr(expected, part) for part in parts)

    def _forward_matters(self) -> bool:
        """Whether what is open can lift the forward of training above the peak (`ForwardBound`), or moves what
        backward needs. Checkpoints run the forward again in backward."""
        if self.result.recomputed or (self._peaks_in_forward() and self._may_release_early()):
            return True
        from staticmem.studies.unsaid_training import ForwardBound, held_by_most, held_in_calls

        graph, peak = self.graph, self.lifetimes.peak_bytes
        maybe_open = ops_left_open(graph) if self._leaves_inplace_open else []
        if maybe_open is None:
            return True
        forward = ForwardBound(graph, self.result.trace, self.lifetimes)
        if forward.stays_below(peak, maybe_open, held_in_calls(graph)):  # more than can be, but known in little time
            return False
        ends = self.ends_of_inplace or (graph, graph)
        if len(ends[0].ops) != len(ends[1].ops):
            return True
        pairs = enumerate(zip(*(end.ops for end in ends), strict=True))
        open_ops = [index for index, (most, least) in pairs if most.target != least.target]
        return not forward.stays_below(peak, open_ops, held_by_most(graph))

    def _peaks_in_forward(self) -> bool:
        lifetimes, trace = self.lifetimes, self.result.trace
        return lifetimes.peak_tick < trace.marks["forward_end"]

    def _may_release_early(self) -> bool:
        """Whether variables, or the caller that the model returns several values to, may hold less than expected."""
        return len(set(self.graph.outputs)) > 1 or self._holds_otherwise("last-use")

    @property
    def _leaves_inplace_open(self) -> bool:
        return not self.graph.inplace_known and self.request.inplace_activations == "auto"

    @cached_property
    def ends_of_inplace(self) -> tuple[Graph, Graph] | None:
        """The graph with as much in place as the file leaves open, and with as little; None where that is the same."""
        if not self._leaves_inplace_open:
            return None
        bound = pipeline.bind(self.model, self.binding)
        most, least = (self._after_passes(bound, policy, pipeline.IN_PLACE).ops for policy in ("most", "least"))
        if len(most) == len(least) and all(one.target == other.target for one, other in zip(most, least, strict=True)):
            return None
        lowest = self._evaluated("its end with most in place", partial(self._after_passes, bound, "most"))
        highest = self._evaluated("its end with least in place", partial(self._after_passes, bound, "least"))
        return lowest or self.graph, highest or self.graph

    def _after_passes(self, bound: Graph, inplace: str, passes: Iterable[Pass] = pipeline.STEP) -> Graph:
        return pipeline.for_step(bound, replace(self.scenario, inplace_activations=inplace), passes)
