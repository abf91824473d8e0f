"""The ONNX Runtime: `memory` is its plan, pattern and arena, `study` makes the report of a session, `formats` shows it,
`validation` runs sessions. Nothing here is named `onnxruntime`, so that no import can mean the other."""
