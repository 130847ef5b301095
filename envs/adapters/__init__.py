"""Other projects' environments, without their frameworks.

Each module serves one kind of environment string: `gym:`, `textworld:`, `trl:`, `skyrl:`,
`openenv:`, `mcp:`. What follows the colon is the argument `target` of its class; everything else
travels in env_config. Nothing of the kind is imported before an environment of it is made.
"""
