"""What exports lost: translations of ONNX and FX texts, and passes that restore what the code did."""
