"""ONNX operators as ATen calls, one module a family; `table` has them all."""
