"""What AOTAutograd traces: the joint graph of a model's forward and backward, in decomposed ATen calls."""
