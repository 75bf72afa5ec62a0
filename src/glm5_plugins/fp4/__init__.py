"""FP4 quantisation that `torch.compile` can trace.

`layouts` says what shape every output has, `reference` computes the bits in plain PyTorch, `calls` lists the
FlashInfer functions that SGLang calls inside traced code, `sites` where it does, and `operator` turns one of them into
a torch operator.
Importing this package imports nothing else.
"""
