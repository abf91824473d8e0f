"""Nodes of the forward that the backward may not compute again, each with the reason.

Source: `should_ban_recomputation`, `ban_recomputation_if_allowed`, `find_first_unfusible` and the two heuristics after
them in `solve_min_cut` of torch/_functorch/partitioners.py; reasons are in PyTorch's words.
"""

from __future__ import annotations

import heapq
from collections.abc import Container

from staticmem.compiler.partition.classify import FAR, Classified
from staticmem.ir.record import record
from staticmem.tracing.nodes import GETITEM, PLACEHOLDER, SAVED, Node

LONG_CHAIN = 100  # `solve_min_cut`: "100 is arbitrary choice to try and prevent degenerate cases"
SMALL_RESULT = 4  # a result that is this many times smaller than what it is computed of is saved


@record(frozen=True, slots=True)
class Options:
    """`MinCutOptions`, with the defaults of torch/_functorch/config.py."""

    used_far_apart: bool = True
    long_fusible_chains: bool = True
    materialized_backward: bool = True
    not_in_allowlist: bool = True
    reduction: bool = True


class Bans:
    """Finds the banned nodes of a classified graph. `reasons` has them by index, in PyTorch's order.

    `allowed` are nodes that a memory budget wants computed again (`dont_ban`).
    """

    def __init__(self, facts: Classified, options: Options, allowed: Container[int] = ()) -> None:
        self.facts, self.options, self.allowed = facts, options, allowed
        self.reasons: dict[int, str] = {}
        self.fusible = [types.fusible for types in facts.types]
        self._ban_by_node()
        if options.used_far_apart:
            self._ban_used_far_apart()
        if options.long_fusible_chains:
            self._ban_long_chains()

    def is_fusible(self, producer: int, user: int) -> bool:
        """A cat takes in what it reads, and is never a producer."""
        return self.facts.types[user].cat or (self.fusible[producer] and self.fusible[user])

    def is_materialized(self, i: int) -> bool:
        """It gets a buffer of its own: an input, or a reader that Inductor does not fuse it into."""
        facts = self.facts
        return (
            facts.returned[i]
            or facts.nodes[i].target == PLACEHOLDER
            or not all(self.is_fusible(i, user) for user in facts.users[i])
        )

    def _ban(self, i: int, reason: str) -> None:
        facts = self.facts
        if not facts.types[i].view and i not in self.allowed and facts.must_recompute[i] <= 0:
            self.reasons.setdefault(i, reason)

    def _ban_by_node(self) -> None:
        facts = self.facts
        primals = set(facts.joint.primals)
        for i, node in enumerate(facts.nodes):
            if facts.after_tangents[i] or facts.must_recompute[i] > 0:
                continue
            if node in primals:
                self._ban(i, "primal input")
            elif facts.forward[i] and node.target != PLACEHOLDER:
                reason = self._reason(i, node)
                if reason:
                    self._ban(i, reason)

    def _reason(self, i: int, node: Node) -> str:
        facts, types = self.facts, self.facts.types[i]
        if node.target == GETITEM:
            return ""
        if facts.must_recompute[i] == SAVED:
            return "marked MUST_SAVE"
        if types.lifted:
            return ""
        if self.options.not_in_allowlist:
            if not types.recomputable:
                return "not in recomputable allowlist"
        elif types.random:
            return "random op"
        elif types.compute_intensive:
            return "compute intensive op"
        if self.options.materialized_backward and self._is_materialized_backward(i):
            return "materialized in backward"
        if self.options.reduction:
            read = sum(facts.sizes[facts.inputs[i][node.inputs.index(arg)]] for arg in node.args if type(arg) is Node)
            if facts.sizes[i] * SMALL_RESULT < read:
                return "reduction op"
        return ""

    def _is_materialized_backward(self, i: int) -> bool:
        """The backward, or an output of the graph, reads it or a view of it without fusing it."""
        facts = self.facts
        if facts.types[i].view:
            return False
        stack, seen = [i], {i}
        while stack:
            cur = stack.pop()
            if facts.returned[cur]:
                return True
            for user in facts.users[cur]:
                if not facts.forward[user] and not self.is_fusible(cur, user):
                    return True
                if facts.types[user].view and user not in seen:
                    seen.add(user)
                    stack.append(user)
        return False

    def _ban_used_far_apart(self) -> None:
        """Of several readers, those behind the first op that does not fuse are not computed again."""
        facts, order = self.facts, self.facts.order
        first_unfusible = self._first_unfusible()
        for i, is_forward in enumerate(facts.forward):
            if not is_forward:
                continue
            users = [user for user in facts.users[i] if facts.forward[user]]
            if len(users) < 2:  # nothing is behind the last reader
                continue
            first = min(first_unfusible[user] for user in users)
            for user in users:
                if order[user] > first and user not in self.reasons and self.is_fusible(i, user):
                    self._ban(user, "used far apart")

    def _first_unfusible(self) -> list[int]:
        """For each node the order of the first one downstream that does not fuse with what it reads, `FAR` where there
        is none. `find_first_unfusible` searches for it from each node anew."""
        facts, order = self.facts, self.facts.order
        first = [FAR] * len(facts.nodes)
        for i in range(len(facts.nodes) - 1, -1, -1):
            for user in facts.users[i]:
                if facts.forward[user]:
                    reached = first[user] if self.is_fusible(i, user) else order[user]
                    if reached < first[i]:
                        first[i] = reached
        return first

    def _ban_long_chains(self) -> None:
        facts, order = self.facts, self.facts.order
        visited: set[int] = set()
        for start, is_forward in enumerate(facts.forward):
            if not is_forward:
                continue
            heap = [(order[start], start)]
            while heap:
                place, cur = heapq.heappop(heap)
                if cur in visited:
                    continue
                visited.add(cur)
                if place > order[start] + LONG_CHAIN and not heap:
                    self._ban(cur, "long fusible chain")
                    break
                for user in facts.users[cur]:
                    if facts.forward[user] and self.is_fusible(cur, user) and user not in self.reasons:
                        heapq.heappush(heap, (order[user], user))
