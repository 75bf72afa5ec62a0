"""SGLang's prefill CUDA graph: how each version is asked for it, how it is compiled, and how it is checked."""
