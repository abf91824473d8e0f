"""Kernels of the CPU provider that take nothing from the arena beside their results.

Tried on onnxruntime 1.32: every case of onnx.backend.test that the runtime takes, with
`session.collect_node_memory_stats_to_file`, and the graphs of `scripts/sessions/session_graphs.py`. Kernels that
take something are in `kernel_memory.WORKSPACES`. Which of these work in place is in `plan`.
"""

_ONNX = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BitShift BitwiseAnd BitwiseNot BitwiseOr
    BitwiseXor Cast Ceil Celu Clip Compress Concat ConstantOfShape Cos Cosh CumSum DepthToSpace
    DequantizeLinear Div Dropout DynamicQuantizeLinear Elu Equal Erf Exp Expand EyeLike Flatten Floor Gather
    GatherElements GatherND Gelu GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual HardSigmoid HardSwish Identity
    InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu Less LessOrEqual Log LpNormalization LpPool MaxPool
    Mish Mod Mul Neg NonMaxSuppression NonZero Not Or PRelu Pad Pow QuantizeLinear Range Reciprocal ReduceL1 ReduceL2
    ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape
    ReverseSequence Round ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign SimplifiedLayerNormalization
    Sin Sinh Size Slice Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Tan Tanh ThresholdedRelu Tile TopK
    Transpose Trilu Unique Unsqueeze Xor SplitToSequence SequenceAt
"""
_MICROSOFT = """
    FastGelu Gelu QLinearAdd QLinearConcat QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearSigmoid
    QLinearSoftmax QuickGelu SkipLayerNormalization
"""
_NCHWC = "Conv MaxPool AveragePool GlobalMaxPool GlobalAveragePool ReorderInput ReorderOutput Upsample"

PLAIN = frozenset(
    (domain, op)
    for domain, names in (("", _ONNX), ("com.microsoft", _MICROSOFT), ("com.microsoft.nchwc", _NCHWC))
    for op in names.split()
)
