"""One file per environment: its prompt, memory, parser and anchors as an `AgentProfile`."""
