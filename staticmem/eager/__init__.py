"""PyTorch's eager semantics without data: storages, strides, owners, autograd nodes, the backward engine."""
