"""What AOTAutograd makes of the calls that ops trace: the joint graph of a model's forward and backward."""
