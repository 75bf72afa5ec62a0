"""FlashInfer's JIT modules, known beforehand, built once on a node, and loaded before anything is captured.

`needs` says which modules a launch uses, `specs` finds them in the installed FlashInfer, `toolkit` what compiles them,
`building` builds them once across processes, and `bundle` ships them to machines that have no compiler.
"""
