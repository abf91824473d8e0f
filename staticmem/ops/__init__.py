"""The ops, one file a family: properties, rule and backward formulas, ONNX translation, FLOPs.

`registry` has the tables, which the families fill when one of their ops is first asked for.
"""

from staticmem.ops.registry import Kind, Rule, argument, flops, in_place, kinds_of, lookup, parameters, rules

__all__ = ["Kind", "Rule", "argument", "flops", "in_place", "kinds_of", "lookup", "parameters", "rules"]
