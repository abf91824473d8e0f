"""The calls that autograd sees of each op under `torch.compile`, in a file for each family of rules."""
