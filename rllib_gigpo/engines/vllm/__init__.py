"""vLLM engines: in this process, and as Ray actors."""
