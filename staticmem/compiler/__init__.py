"""What `torch.compile` makes of a graph: the joint graph of AOTAutograd, its partition, the buffers of Inductor.

    Graph ─► aot ─► JointGraph ─► partition ─► forward and backward ─► inductor ─► Plan of each ─► engine

`nodes` has the graphs, `plan` what the engine runs. Nothing here runs PyTorch.
"""
