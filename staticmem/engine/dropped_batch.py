"""A batch that the training loop deletes before backward: `del x, y`."""

from __future__ import annotations

from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner
from staticmem.engine.features import Feature


class DroppedBatch(Feature):
    """Inputs and targets that the loop deletes once it has the loss. Those of the next step come after the optimizer's
    step, where gradients are still there."""

    def place(self) -> None:
        model, categories = self.step.interpreter.model, self.e.trace.buffers.categories
        self.batch = Owner(Reason.MODEL, "")
        self.batch.held = [row for row in model.held if categories[row[0].storage.id] == "input"]
        model.held = [row for row in model.held if row not in self.batch.held]
        self.tensors = [tensor for tensor, _ in self.batch.held]
        self.first = [tensor.storage.id for tensor in self.tensors]

    def begin_forward(self) -> None:
        if not self.batch.held:  # that of another micro-batch
            self._load()

    def begin_backward(self) -> None:
        self.e.release(self.batch)

    def end_update(self) -> None:
        self._load()
        news = [tensor.storage.id for tensor in self.tensors]
        self.e.trace.replaced_by.update({old: (new,) for old, new in zip(self.first, news, strict=True)})

    def _load(self) -> None:
        """Others in the place of each: what still has the old ones keeps them."""
        e, step = self.e, self.step
        names = (step.interpreter.env, step.criterion.targets)
        olds, self.tensors = self.tensors, []
        for old in olds:
            new = e.empty(old.shape, old.dtype, old.strides, kernel="model")
            new.name = old.name
            e.categorise(new, "input", old.name)
            e.hold(new, self.batch)
            self.tensors.append(new)
            for table in names:
                table.update({name: new for name, tensor in table.items() if tensor is old})
