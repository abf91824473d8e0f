"""What a GPU and the libraries on it add to the tensors: usable memory, context, workspaces. Data with sources.

Nothing here reads a graph or an allocator: pure functions over sizes, and YAML that is checked when it is loaded.
"""
