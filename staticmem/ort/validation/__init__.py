"""`validate --runtime onnxruntime`: a session, predicted, run (`child`) and compared (`reconcile`)."""
