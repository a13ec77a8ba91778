"""The sub-commands of `compiled-engine`; each module has `add_arguments` and `run`."""
