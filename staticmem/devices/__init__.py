"""What a GPU and its libraries take beside the tensors: driver, context, workspaces. Data with sources.

Nothing here reads a graph or an allocator: pure functions over sizes, and YAML that is checked when it is loaded.
"""
