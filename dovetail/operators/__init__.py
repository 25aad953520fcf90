"""The operators: type rule, exact meaning, ONNX meaning and cropping of each in one class."""
