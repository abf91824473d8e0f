"""The order in which kernels run: of four, the one with the lowest estimated peak.

Source: `torch/_inductor/memory.py` of PyTorch 2.15 (`reorder_for_peak_memory` and what it calls). Sizes are elements
times bytes of an element, without padding, and nothing is computed in place.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from staticmem.compiler.inductor.buffers import Buffer
from staticmem.compiler.inductor.schedule import STAR, Schedule, SNode
from staticmem.eager.strides import numel


class Sizes:
    """Sizes and readers of buffers, for one list of nodes (`prepare_planning_info`).

    Attributes:
        nodes: what is ordered; a node is its position here.
        outputs: numbers of buffers that each node writes.
        alloc, free: bytes that each buffer takes when it is written, and gives back; of an input that may be freed too.
        readers: nodes after which a buffer may go.
        before, after: nodes that each node has to wait for, and that wait for it.
        held: buffers and inputs that each node reads, which may go behind it.
        inputs: numbers of the inputs that may be freed.
        returned: numbers of buffers that the graph returns.
    """

    def __init__(self, schedule: Schedule, nodes: Sequence[SNode], freeable: Collection[int]) -> None:
        self.schedule, self.nodes = schedule, list(nodes)
        self.returned = schedule.returned
        self.outputs = [[buffer.number for buffer in node.outputs] for node in self.nodes]
        writer = {number: at for at, outputs in enumerate(self.outputs) for number in outputs}
        real = schedule.real
        self.alloc: dict[int, int] = {}
        self.free: dict[int, int] = {}
        for node in self.nodes:
            for buffer in node.outputs:
                self._size(buffer)
        reads: dict[int, dict[int, None]] = {}
        order: dict[int, dict[int, None]] = {}
        for at, node in enumerate(self.nodes):
            for number in node.waits:
                reads.setdefault(number, {})[at] = None
                order.setdefault(number, {})[at] = None
            for number in node.weak:
                order.setdefault(number, {})[at] = None
        for number in sorted(real, reverse=True):  # a buffer lives until its last other name is read
            reads.setdefault(real[number], {}).update(reads.get(number, {}))
            order.setdefault(real[number], {}).update(order.get(number, {}))
        self.inputs = {number for number in freeable if number in reads}
        for number in self.inputs:  # `get_freeable_input_buf`: what the last access reaches
            accesses = self.nodes[list(reads[number])[-1]].reads.get(number, (STAR,))
            self.free[number] = schedule.bytes_of(number, list(accesses)[-1])
        self.readers = {number: list(reads.get(number, ())) for number in (*writer, *self.inputs)}
        count = len(self.nodes)
        after: list[dict[int, None]] = [{} for _ in range(count)]
        before: list[dict[int, None]] = [{} for _ in range(count)]
        held: list[dict[int, None]] = [{} for _ in range(count)]
        for at, outputs in enumerate(self.outputs):
            for number in outputs:
                after[at].update(dict.fromkeys(order.get(number, ())))
                for reader in self.readers[number]:
                    held[reader][number] = None
            after[at].pop(at, None)
            for then in after[at]:
                before[then][at] = None
        for number in self.inputs:
            for reader in self.readers[number]:
                held[reader][number] = None
        self.before = [list(numbers) for numbers in before]
        self.after = [list(numbers) for numbers in after]
        self.held = [list(numbers) for numbers in held]
        self.size = [sum(self.alloc[number] for number in outputs) for outputs in self.outputs]

    def _size(self, buffer: Buffer, part: bool = False) -> int:
        """`compute_size_for_scheduler_buffer`: several results count where the kernel runs."""
        number = buffer.number
        if not part and number in self.alloc:
            return self.alloc[number]
        if number in self.schedule.real:
            self.alloc[number] = self.free[number] = 0
            return 0
        if buffer.without_tensor:
            total = 0
            for user in self.schedule.readers(number):
                if user.node is not None:
                    total += sum(self._size(other, True) for other in user.node.outputs if other.fresh)
            self.alloc[number], self.free[number] = (0 if part else total), 0
            return total
        size = numel(buffer.shape) * buffer.dtype.itemsize
        self.alloc[number], self.free[number] = (0 if part else size), size
        return size

    def timeline(self, order: Sequence[int]) -> tuple[int, list[int]]:
        """The peak of an order, and what is alive at each of its steps (`estimate_peak_memory`)."""
        step = [0] * len(order)
        for at, node in enumerate(order):
            step[node] = at
        delta = [0] * (len(order) + 1)
        for number in self.inputs:
            delta[0] += self.free[number]
            if number not in self.returned and self.readers[number]:
                delta[max(step[reader] for reader in self.readers[number]) + 1] -= self.free[number]
        for at, node in enumerate(order):
            for number in self.outputs[node]:
                delta[at] += self.alloc[number]
                if number not in self.returned:
                    readers = self.readers[number]
                    end = max(step[reader] for reader in readers) if readers else at
                    delta[end + 1] -= self.free[number]
        alive, peak, live = [], 0, 0
        for change in delta:
            live += change
            alive.append(live)
            peak = max(peak, live)
        return peak, alive


def reorder(sizes: Sizes) -> list[SNode]:
    """The best of the orders; the first of equals."""
    every = range(len(sizes.nodes))
    best = list(every)
    peak = sizes.timeline(best)[0]
    for method in (least_peak_first, breadth_first, depth_first):
        order = method(sizes)
        if len(order) != len(best):
            continue  # PyTorch raises; fusions that wait for one another would do this
        estimate = sizes.timeline(order)[0]
        if estimate < peak:
            best, peak = order, estimate
    return [sizes.nodes[at] for at in best]


def least_peak_first(sizes: Sizes) -> list[int]:
    """Of what is ready, what raises the peak least, then what frees most (`topological_sort_lpmf`)."""
    nodes = range(len(sizes.nodes))
    waiting = [len(before) for before in sizes.before]
    left = {number: len(readers) + (number in sizes.returned) for number, readers in sizes.readers.items()}
    for numbers in sizes.outputs:
        for number in numbers:
            left.setdefault(number, 1 if number in sizes.returned else 0)
    live = sum(sizes.free[number] for number in sizes.inputs)
    outputs = sum(sizes.free.get(number, 0) for number in sizes.returned)
    peak = max(live, outputs)
    frees = [0] * len(nodes)
    for at in nodes:
        frees[at] = sum(sizes.free[n] for n in sizes.held[at] if left[n] == 1)
        frees[at] += sum(sizes.free[n] for n in sizes.outputs[at] if left[n] == 0)
    ready = Ready(sizes.size)
    for at in nodes:
        if not waiting[at]:
            ready.add(at, frees[at])
    order: list[int] = []
    while len(order) < len(nodes) and ready:
        at = ready.pop(peak - live)
        order.append(at)
        live += sizes.size[at]
        peak = max(peak, live)
        live -= frees[at]
        for then in sizes.after[at]:
            waiting[then] -= 1
            if not waiting[then]:
                ready.add(then, frees[then])
        for number in sizes.held[at]:
            left[number] -= 1
            if left[number] == 1:
                for reader in sizes.readers[number]:
                    frees[reader] += sizes.free[number]
                    ready.update(reader, frees[reader])
    return order


class Ready:
    """The nodes that are ready. `min` over all of them would be quadratic: two heaps, of which stale entries drop out.

    Those that fit under the peak so far go by what they leave; the others by what they take.
    """

    def __init__(self, size: Sequence[int]) -> None:
        self.size = size
        self.frees: dict[int, int] = {}
        self.by_rest: list[tuple[int, int]] = []
        self.by_size: list[tuple[int, int, int]] = []

    def __bool__(self) -> bool:
        return bool(self.frees)

    def add(self, at: int, frees: int) -> None:
        self.frees[at] = frees
        heapq.heappush(self.by_rest, (self.size[at] - frees, at))
        heapq.heappush(self.by_size, (self.size[at], self.size[at] - frees, at))

    def update(self, at: int, frees: int) -> None:
        if at in self.frees and self.frees[at] != frees:
            self.add(at, frees)

    def _fresh(self, at: int, rest: int) -> bool:
        return at in self.frees and self.size[at] - self.frees[at] == rest

    def pop(self, gap: int) -> int:
        aside = []
        best = -1
        while self.by_rest:
            rest, at = self.by_rest[0]
            if not self._fresh(at, rest):
                heapq.heappop(self.by_rest)
            elif self.size[at] <= gap:
                heapq.heappop(self.by_rest)
                best = at
                break
            else:  # too large now; it may fit later
                aside.append(heapq.heappop(self.by_rest))
        for entry in aside:
            heapq.heappush(self.by_rest, entry)
        if best < 0:
            while True:
                _, rest, at = heapq.heappop(self.by_size)
                if self._fresh(at, rest):
                    best = at
                    break
        del self.frees[best]
        return best


def breadth_first(sizes: Sizes) -> list[int]:
    """Of what is ready, what waited for the earliest (`topological_sort_bfs`)."""
    waiting = [len(before) for before in sizes.before]
    place = [-1] * len(waiting)
    ready: list[tuple[list[int], int]] = []

    def push(at: int) -> None:
        heapq.heappush(ready, (sorted({place[before] for before in sizes.before[at]}), at))

    for at, count in enumerate(waiting):
        if not count:
            push(at)
    order: list[int] = []
    while ready:
        at = heapq.heappop(ready)[1]
        place[at] = len(order)
        order.append(at)
        for then in sizes.after[at]:
            waiting[then] -= 1
            if not waiting[then]:
                push(then)
    return order


def depth_first(sizes: Sizes) -> list[int]:
    """Depth first, small ones before large ones (`topological_sort_dfs`)."""
    count = len(sizes.nodes)
    weight = [sizes.size[at] + sum(sizes.free[n] for n in sizes.held[at]) for at in range(count)]
    key = [(weight[at], at) for at in range(count)]
    seen = [False] * count
    order: list[int] = []
    for root in sorted(range(count), key=key.__getitem__):
        if seen[root]:
            continue
        seen[root] = True
        stack = [(root, iter(sorted(sizes.before[root], key=key.__getitem__)))]
        while stack:
            at, before = stack[-1]
            for wanted in before:
                if not seen[wanted]:
                    seen[wanted] = True
                    stack.append((wanted, iter(sorted(sizes.before[wanted], key=key.__getitem__))))
                    break
            else:
                stack.pop()
                order.append(at)
    return order
