"""Tool calls of models in this process: how a family writes them, reading them out of its text, forcing them."""
