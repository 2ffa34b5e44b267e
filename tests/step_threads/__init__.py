"""Public reports of wrong gradients and updates, rebuilt as small jobs that are wrong in the same way."""
