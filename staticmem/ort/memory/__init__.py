"""What a session of the ONNX Runtime does with memory: order, allocation plan, memory pattern, arena.

Source: microsoft/onnxruntime, onnxruntime/core/framework (allocation_planner.cc, execution_frame.cc,
mem_pattern_planner.h, bfc_arena.cc); checked against onnxruntime 1.31 on the CPU provider (docs/onnxruntime.md).
"""
